"""A result of `bench decode` as tables, and two of them side by side."""

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from .decode import MLX_LM, PLAIN
from .rows import Row, Setting, categories, rows, settings
from .timing import Measured

NUMBERS = (
    *("tokens", "drafted", "accepted", "per depth", "tok/\ncycle", "tok/s", "over\nplain", "over\nmlx-lm"),
    *("prompt\ntok/s", "peak\nGB"),
)
STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left"}
COMPARED = {"tok/s": "speed", f"over {PLAIN}": "vs_plain", f"over {MLX_LM}": "vs_mlx_lm"}
UNLIKE = ("chip", "memory_bytes", "cores", "os", "python", "device", "blas", "threads", "mlx", "mlx_lm", "mlx_mtp")


def overall(found: dict[str, Any], setting: Setting) -> Table:
    """A row per loop, over all prompts."""
    table = Table("loop", title=_title(found, setting), **STYLE)
    for name in NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    different = {d["contender"] for d in found["differences"] if _of(d) == setting}
    for row in rows(found, setting):
        remarks = [*(["text differs"] if row.contender in different else []), *_inconclusive(row)]
        table.add_row(row.contender, *_cells(row), ", ".join(remarks))
    return table


def by_category(found: dict[str, Any], setting: Setting) -> Table:
    """A row per kind of prompt: each loop's speed over that of our plain one."""
    names = [row.contender for row in rows(found, setting) if row.contender != PLAIN]
    table = Table("prompts", title="tok/s over plain, by kind of prompt", **STYLE)
    for name in ("tokens", *names):
        table.add_column(name, justify="right")
    table.add_column("inconclusive")
    for category in categories(found):
        of_loop = {row.contender: row for row in rows(found, setting, category)}
        ratios = {name: of_loop[name].vs_plain if name in of_loop else None for name in names}
        wide = [name for name, value in ratios.items() if value and not value.conclusive]
        doubtful = "all" if wide == names else ", ".join(wide)
        table.add_row(category, f"{of_loop[PLAIN].tokens:.0f}", *map(_median, ratios.values()), doubtful)
    return table


def _title(found: dict[str, Any], setting: Setting) -> str:
    context, kv_bits, mtp_kv_bits = setting
    parts = [found["model"]["name"], f"{context} tokens of context" if context else "prompts as they are"]
    parts += [f"{bits}-bit {what}" for bits, what in ((kv_bits, "KV"), (mtp_kv_bits, "heads' KV")) if bits]
    if found["model"]["synthetic"]:
        parts.append(f"SYNTHETIC: {found['model']['synthetic']}")
    return ", ".join(parts)


def _of(difference: dict[str, Any]) -> Setting:
    return difference["context"], difference["kv_bits"], difference["mtp_kv_bits"]


def _inconclusive(row: Row) -> list[str]:
    return [] if row.conclusive else ["inconclusive"]


def _cells(row: Row) -> list[str]:
    drafting = row.drafted > 0
    return [
        f"{row.tokens:.0f}",
        f"{row.drafted:.0f}" if drafting else "",
        f"{row.accepted:.0f}" if drafting else "",
        "/".join("-" if rate is None else f"{rate:.0%}" for rate in row.rates) if drafting else "",
        f"{row.tokens_per_cycle:.2f}" if drafting and row.tokens_per_cycle else "",
        f"{row.speed.median:.1f}" if row.speed else "",
        _with_spread(row.vs_plain) if row.contender != PLAIN else "1",
        _with_spread(row.vs_mlx_lm) if row.contender != MLX_LM else "1",
        f"{row.prompt_speed:.0f}" if row.prompt_speed else "",
        f"{row.peak_bytes / 1e9:.3f}",
    ]


def _with_spread(value: Measured | None) -> str:
    if value is None:
        return ""
    return f"{value.median:.2f} ({value.spread:.0%})" if value.count > 1 else f"{value.median:.2f} (-)"


def _median(value: Measured | None) -> str:
    return f"{value.median:.2f}" if value else ""


@dataclass(frozen=True)
class Change:
    """A loop's speed, or its ratio to plain, in two results."""

    setting: Setting
    contender: str
    what: str
    before: Measured
    after: Measured

    @property
    def ratio(self) -> float:
        return self.after.median / self.before.median

    @property
    def beyond(self) -> bool:
        """Whether it has changed by more than the spread of either."""
        known = min(self.before.count, self.after.count) > 1
        return known and abs(self.ratio - 1) > max(self.before.spread, self.after.spread)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Speeds and ratios to plain of every loop and setting that both results have."""
    found = []
    for setting in settings(after):
        old = {row.contender: row for row in rows(before, setting)} if setting in settings(before) else {}
        for row in rows(after, setting):
            for what, name in COMPARED.items():
                earlier, later = getattr(old.get(row.contender), name, None), getattr(row, name)
                if earlier and later and what != f"over {row.contender}":
                    found.append(Change(setting, row.contender, what, earlier, later))
    return found


def unlike(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What two results do not share, which may explain a change, one line each."""
    lines = []
    for part in ("environment", "model", "options"):
        names = UNLIKE if part == "environment" else sorted(before[part].keys() | after[part].keys())
        pairs = [(name, before[part].get(name), after[part].get(name)) for name in names]
        lines += [f"{part}: {name} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]
    old = {_key(entry): entry["text"] for entry in before["entries"]}
    other = [key for entry in after["entries"] if old.get(key := _key(entry), entry["text"]) != entry["text"]]
    return [*lines, *([f"texts: {len(other)} of {len(after['entries'])} are others"] if other else [])]


def _key(entry: dict[str, Any]) -> tuple:
    return *_of(entry), entry["category"], entry["contender"], entry["prompt_tokens"]


def compared(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """A row per speed and ratio that both results have, and whether it has changed by more than their spreads."""
    table = Table("context", "KV", "loop", "what", title="compared with the earlier result", **STYLE)
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    table.add_column("")
    for change in changes(before, after):
        context, kv_bits, mtp_kv_bits = change.setting
        table.add_row(
            str(context or ""),
            "/".join(str(bits) for bits in (kv_bits, mtp_kv_bits) if bits),
            change.contender,
            change.what,
            _with_spread(change.before),
            _with_spread(change.after),
            f"{change.ratio:.2f}x",
            "beyond both spreads" if change.beyond else "",
        )
    return table
