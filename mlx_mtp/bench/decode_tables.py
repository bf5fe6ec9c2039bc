"""Summarise a result of `bench decode` as rows and tables, and compare two results."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from rich import box
from rich.table import Column, Table

from ..decoding.summary import paused, percentages, shares
from .decode import MLX_LM, PLAIN
from .timing import Measured, measured, ratio

NUMBERS = ("tokens", "drafted", "accepted", "per depth", "tok/\ncycle", "tok/s", "over\nplain", "over\nmlx-lm")
NUMBERS += ("prompt\ntok/s", "peak\nGB")
STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
STYLE |= {"title_justify": "left", "caption_justify": "left"}
COMPARED = {"tok/s": "speed", f"over {PLAIN}": "vs_plain", f"over {MLX_LM}": "vs_mlx_lm"}
UNLIKE = ("chip", "memory_bytes", "cores", "os", "python", "device", "blas", "threads", "mlx", "mlx_lm", "mlx_mtp")

Setting = tuple[int, int | None, int | None]  # context, kv_bits, mtp_kv_bits


class SpeedRow:
    """One loop over some prompts in one setting.

    tokens, drafted, accepted: per round on average, with drafts of lookups and grammars.
    rates:  per depth, the share of the heads' drafts that were accepted; None without drafts.
    paused: why drafting was paused at the end of its last run, else "".
    speed:  tokens/s since the first token; vs_plain, vs_mlx_lm: ratio to these loops within a round. None without
            a second token, or without these loops. tokens_per_cycle: None without cycles, as mlx-lm's.
    prompt_speed: tokens/s; peak_bytes: the maximum.
    """

    def __init__(self, name: str, entries: list[dict[str, Any]], speeds: dict[str, list[float]]):
        self.contender, rounds, own = name, len(entries[0]["seconds"]), speeds[name]
        drafted, accepted = (
            [sum(depth) for depth in zip(*(depths for e in entries for depths in e[kind]), strict=True)]
            for kind in ("drafted", "accepted")
        )
        others, others_kept, cycles, tokens = (
            sum(sum(e.get(kind, ())) for e in entries for kind in kinds)  # old results have none of some
            for kinds in (
                ("lookup_drafted", "grammar_drafted", "tree_drafted"),
                ("lookup_accepted", "grammar_accepted", "tree_accepted"),
                ("cycles",),
                ("tokens",),
            )
        )
        read, kept = sum(e["read_seconds"] for e in entries), sum(accepted) + others_kept
        self.prompt_tokens = sum(e["prompt_tokens"] for e in entries)
        self.tokens, self.drafted, self.accepted = (n / rounds for n in (tokens, sum(drafted) + others, kept))
        self.rates = shares(drafted, accepted)
        self.paused = next((e["paused"][-1] for e in reversed(entries) if e.get("paused")), "")  # not in old results
        self.tokens_per_cycle = 1 + kept / cycles if cycles else None
        self.speed = measured(own) if own else None
        bases = (speeds.get(base) for base in (PLAIN, MLX_LM))
        self.vs_plain, self.vs_mlx_lm = (ratio(own, base) if base and own else None for base in bases)
        self.prompt_speed = (self.prompt_tokens - len(entries)) / read if read else None
        self.peak_bytes = max(max(*e["peak_bytes"], e["read_peak_bytes"]) for e in entries)

    @property
    def conclusive(self) -> bool:
        """Whether its ratios to plain and to mlx-lm, or its speed if it has none, have a spread of at most 5%.

        Never after a single round, or without a speed.
        """
        ratios = [m for m, base in ((self.vs_plain, PLAIN), (self.vs_mlx_lm, MLX_LM)) if m and base != self.contender]
        return all(m is not None and m.conclusive for m in ratios or [self.speed])


setting_of = itemgetter("context", "kv_bits", "mtp_kv_bits")  # the Setting of a result's entry, or of a difference


def settings(found: dict[str, Any]) -> list[Setting]:
    """Return a result's distinct settings (context, kv_bits, mtp_kv_bits), in the order of their first entries."""
    return list(dict.fromkeys(setting_of(entry) for entry in found["entries"]))


def categories(found: dict[str, Any]) -> list[str]:
    """Return a result's distinct categories of prompts, in the order of their first entries."""
    return list(dict.fromkeys(entry["category"] for entry in found["entries"]))


def rows(found: dict[str, Any], setting: Setting, category: str | None = None) -> list[SpeedRow]:
    """Return a Row per loop, over the prompts of a setting and of a category (None: of all categories)."""
    loops: dict[str, list[dict[str, Any]]] = {}
    for entry in found["entries"]:
        if setting_of(entry) == setting and category in (None, entry["category"]):
            loops.setdefault(entry["contender"], []).append(entry)
    speeds = {name: _speeds(entries) for name, entries in loops.items()}
    return [SpeedRow(name, entries, speeds) for name, entries in loops.items()]


def _speeds(entries: Sequence[dict[str, Any]]) -> list[float]:
    """Return, for each round with tokens after the first, these tokens per second over all prompts."""
    rounds = zip(*(zip(e["tokens"], e["seconds"], strict=True) for e in entries), strict=True)
    totals = [(sum(n - 1 for n, _ in prompts), sum(s for _, s in prompts)) for prompts in rounds]
    return [tokens / seconds for tokens, seconds in totals if tokens > 0]


def right(header: str) -> Column:
    """Return a column of numbers with this header."""
    return Column(header, justify="right")


def overall(found: dict[str, Any], setting: Setting) -> Table:
    """Return a table of a result with a row per loop, over all prompts of a setting."""
    context, kv_bits, mtp_kv_bits = setting
    title = [found["model"]["name"], f"{context} tokens of context" if context else "prompts as they are"]
    title += [f"{bits}-bit {what}" for bits, what in ((kv_bits, "KV"), (mtp_kv_bits, "heads' KV")) if bits]
    if synthetic := found["model"]["synthetic"]:
        title.append(f"SYNTHETIC: {synthetic}")
    numbers = [Column(name, justify="right", no_wrap=True) for name in NUMBERS]
    table = Table("loop", *numbers, "", title=", ".join(title), **STYLE)
    different = {d["contender"] for d in found["differences"] if setting_of(d) == setting}
    notes = []
    for row in rows(found, setting):
        remarks = ["text differs"] * (row.contender in different) + ["inconclusive"] * (not row.conclusive)
        table.add_row(row.contender, *_cells(row), ", ".join(remarks))
        notes += [f"{row.contender}: {paused(row.paused)}"] if row.paused else []
    table.caption = "\n".join(notes) or None
    return table


def by_category(found: dict[str, Any], setting: Setting) -> Table:
    """Return a table of a result with a row per category of prompts: each loop's speed over our plain loop's."""
    names = [row.contender for row in rows(found, setting) if row.contender != PLAIN]
    headers = "prompts", *map(right, ("tokens", *names)), "inconclusive"
    table = Table(*headers, title="tok/s over plain, by kind of prompt", **STYLE)
    for category in categories(found):
        of_loop = {row.contender: row for row in rows(found, setting, category)}
        ratios = {name: of_loop[name].vs_plain if name in of_loop else None for name in names}
        wide = [name for name, value in ratios.items() if value and not value.conclusive]
        cells = (f"{value.median:.2f}" if value else "" for value in ratios.values())
        table.add_row(category, f"{of_loop[PLAIN].tokens:.0f}", *cells, "all" if wide == names else ", ".join(wide))
    return table


def _cells(row: SpeedRow) -> list[str]:
    rates = percentages(row.rates, separator="/", missing="-")
    per_cycle = f"{row.tokens_per_cycle:.2f}" if row.tokens_per_cycle else ""
    drafts = [f"{row.drafted:.0f}", f"{row.accepted:.0f}", rates, per_cycle] if row.drafted > 0 else [""] * 4
    speed = f"{row.speed.median:.1f}" if row.speed else ""
    prompt_speed = f"{row.prompt_speed:.0f}" if row.prompt_speed else ""
    bases = ((PLAIN, row.vs_plain), (MLX_LM, row.vs_mlx_lm))
    ratios = ["1" if row.contender == base else _with_spread(value) for base, value in bases]
    return [f"{row.tokens:.0f}", *drafts, speed, *ratios, prompt_speed, f"{row.peak_bytes / 1e9:.3f}"]


def _with_spread(value: Measured | None) -> str:
    return f"{value.median:.2f} ({f'{value.spread:.0%}' if value.count > 1 else '-'})" if value else ""


class SpeedChange(NamedTuple):
    """A loop's speed, or its ratio to another loop, in two results.

    what: the compared value, "tok/s" or "over ...". ratio: after over before. beyond: whether it changed by more than
    both spreads; never if a result has a single round.
    """

    setting: Setting
    contender: str
    what: str
    before: Measured
    after: Measured
    ratio: float
    beyond: bool


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[SpeedChange]:
    """Return a Change for each speed and ratio of the loops and settings that both results have."""
    found = []
    for setting in settings(after):
        old = {row.contender: row for row in rows(before, setting)}
        for row in rows(after, setting):
            for what, name in COMPARED.items():
                earlier, later = getattr(old.get(row.contender), name, None), getattr(row, name)
                if earlier and later and what != f"over {row.contender}":
                    change, known = later.median / earlier.median, min(earlier.count, later.count) > 1
                    beyond = known and abs(change - 1) > max(earlier.spread, later.spread)
                    found.append(SpeedChange(setting, row.contender, what, earlier, later, change, beyond))
    return found


def unlike(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each difference in environment, model or options that may explain a change between results.

    If texts differ, a last line states the number of entries whose text differs.
    """
    lines = []
    for part in ("environment", "model", "options"):
        names = UNLIKE if part == "environment" else sorted(before[part].keys() | after[part].keys())
        pairs = [(name, before[part].get(name), after[part].get(name)) for name in names]
        lines += [f"{part}: {name} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]
    place = itemgetter("context", "kv_bits", "mtp_kv_bits", "category", "contender", "prompt_tokens")
    texts = {place(entry): entry["text"] for entry in before["entries"]}
    other = sum(texts.get(place(entry), entry["text"]) != entry["text"] for entry in after["entries"])
    return [*lines, *([f"texts: {other} of {len(after['entries'])} differ"] if other else [])]


def compared(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """Return a table of the speeds and ratios in both results, and whether they changed beyond both spreads."""
    headers = "context", "KV", "loop", "what", *map(right, ("before", "after", "change")), ""
    table = Table(*headers, title="compared with the earlier result", **STYLE)
    for change in changes(before, after):
        context, *bits = change.setting
        kv = "/".join(str(b) for b in bits if b)
        values = _with_spread(change.before), _with_spread(change.after), f"{change.ratio:.2f}x"
        beyond = "beyond both spreads" if change.beyond else ""
        table.add_row(str(context or ""), kv, change.contender, change.what, *values, beyond)
    return table
