"""What a result of `bench decode` says: a row per loop and kind of prompt, from its raw values."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .decode import MLX_LM, PLAIN
from .timing import Measured, measured, ratio

Setting = tuple[int, int | None, int | None]  # context, kv_bits, mtp_kv_bits


@dataclass(frozen=True)
class Row:
    """One loop over some prompts in one setting.

    tokens, drafted, accepted: of one round on average, what was looked up included.
    rates:  per depth, the share of the heads' drafts that were kept; None where there were none.
    speed:  tokens/s since the first token; vs_plain, vs_mlx_lm: over these loops' within a round, None without them.
    prompt_speed: tokens/s; peak_bytes: the largest.
    """

    setting: Setting
    contender: str
    prompt_tokens: int
    tokens: float
    drafted: float
    accepted: float
    rates: list[float | None]
    tokens_per_cycle: float | None
    speed: Measured | None
    vs_plain: Measured | None
    vs_mlx_lm: Measured | None
    prompt_speed: float | None
    peak_bytes: int

    @property
    def conclusive(self) -> bool:
        """Whether its ratios are known well enough; that of the plain loop itself is its speed's."""
        ratios = [m for m, base in ((self.vs_plain, PLAIN), (self.vs_mlx_lm, MLX_LM)) if m and base != self.contender]
        return all(m is not None and m.conclusive for m in ratios or [self.speed])


def settings(found: dict[str, Any]) -> list[Setting]:
    """The settings that were measured, in order."""
    return list(dict.fromkeys(_setting(entry) for entry in found["entries"]))


def categories(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(entry["category"] for entry in found["entries"]))


def rows(found: dict[str, Any], setting: Setting, category: str | None = None) -> list[Row]:
    """A row per loop, over all prompts of a setting or those of a category."""
    chosen = [e for e in found["entries"] if _setting(e) == setting and category in (None, e["category"])]
    loops = {
        name: [e for e in chosen if e["contender"] == name] for name in dict.fromkeys(e["contender"] for e in chosen)
    }
    speeds = {name: list(_speeds(entries)) for name, entries in loops.items()}
    return [_row(name, setting, entries, speeds) for name, entries in loops.items()]


def _setting(entry: dict[str, Any]) -> Setting:
    return entry["context"], entry["kv_bits"], entry["mtp_kv_bits"]


def _speeds(entries: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Tokens after the first per second, of all prompts together, round by round; nothing where there are none."""
    for tokens, seconds in zip(_rounds(entries, "tokens"), _rounds(entries, "seconds"), strict=True):
        if sum(tokens) > len(tokens):
            yield (sum(tokens) - len(tokens)) / sum(seconds)


def _rounds(entries: Iterable[dict[str, Any]], name: str) -> list[tuple]:
    """Per round, the values of all prompts."""
    return list(zip(*(entry[name] for entry in entries), strict=True))


def _row(name: str, setting: Setting, entries: list[dict[str, Any]], speeds: dict[str, list[float]]) -> Row:
    rounds = len(entries[0]["seconds"])
    drafted, accepted = (_by_depth(entries, kind) for kind in ("drafted", "accepted"))
    looked_up = [sum(sum(e[kind]) for e in entries) for kind in ("lookup_drafted", "lookup_accepted")]
    cycles = sum(sum(e["cycles"]) for e in entries)
    prompt_tokens = sum(e["prompt_tokens"] for e in entries)
    read = sum(e["read_seconds"] for e in entries)
    kept = sum(accepted) + looked_up[1]
    return Row(
        setting=setting,
        contender=name,
        prompt_tokens=prompt_tokens,
        tokens=sum(sum(e["tokens"]) for e in entries) / rounds,
        drafted=(sum(drafted) + looked_up[0]) / rounds,
        accepted=kept / rounds,
        rates=[a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        tokens_per_cycle=1 + kept / cycles if cycles else None,
        speed=measured(speeds[name]) if speeds[name] else None,
        vs_plain=_ratio(speeds, name, PLAIN),
        vs_mlx_lm=_ratio(speeds, name, MLX_LM),
        prompt_speed=(prompt_tokens - len(entries)) / read if read else None,
        peak_bytes=max(max(*e["peak_bytes"], e["read_peak_bytes"]) for e in entries),
    )


def _by_depth(entries: Iterable[dict[str, Any]], kind: str) -> list[int]:
    counts = [depths for entry in entries for depths in entry[kind]]
    return [sum(depth) for depth in zip(*counts, strict=True)]


def _ratio(speeds: dict[str, list[float]], name: str, base: str) -> Measured | None:
    if not speeds.get(base) or not speeds[name]:
        return None
    return ratio(speeds[name], speeds[base])
