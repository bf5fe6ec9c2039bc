"""Summarise a result of `bench decode`: a row per loop and kind of prompt, from its raw values."""

from collections.abc import Sequence
from typing import Any

from .decode import MLX_LM, PLAIN
from .timing import measured, ratio

Setting = tuple[int, int | None, int | None]  # context, kv_bits, mtp_kv_bits


class Row:
    """One loop over some prompts in one setting.

    tokens, drafted, accepted: of one round on average, what was looked up included.
    rates:  per depth, the share of the heads' drafts that were kept; None where there were none.
    speed:  tokens/s since the first token; vs_plain, vs_mlx_lm: over these loops' within a round, None without them.
    prompt_speed: tokens/s; peak_bytes: the largest.
    """

    def __init__(self, name: str, entries: list[dict[str, Any]], speeds: dict[str, list[float]]):
        self.contender, rounds, own = name, len(entries[0]["seconds"]), speeds[name]
        drafted, accepted = (
            [sum(depth) for depth in zip(*(depths for e in entries for depths in e[kind]), strict=True)]
            for kind in ("drafted", "accepted")
        )
        looked_up, lookup_kept, cycles, tokens = (
            sum(sum(e[kind]) for e in entries) for kind in ("lookup_drafted", "lookup_accepted", "cycles", "tokens")
        )
        read, kept = sum(e["read_seconds"] for e in entries), sum(accepted) + lookup_kept
        self.prompt_tokens = sum(e["prompt_tokens"] for e in entries)
        self.tokens, self.drafted, self.accepted = (n / rounds for n in (tokens, sum(drafted) + looked_up, kept))
        self.rates = [a / d if d else None for a, d in zip(accepted, drafted, strict=True)]
        self.tokens_per_cycle = 1 + kept / cycles if cycles else None
        self.speed = measured(own) if own else None
        bases = (speeds.get(base) for base in (PLAIN, MLX_LM))
        self.vs_plain, self.vs_mlx_lm = (ratio(own, base) if base and own else None for base in bases)
        self.prompt_speed = (self.prompt_tokens - len(entries)) / read if read else None
        self.peak_bytes = max(max(*e["peak_bytes"], e["read_peak_bytes"]) for e in entries)

    @property
    def conclusive(self) -> bool:
        """Whether its ratios are known well enough; that of the plain loop itself is its speed's."""
        ratios = [m for m, base in ((self.vs_plain, PLAIN), (self.vs_mlx_lm, MLX_LM)) if m and base != self.contender]
        return all(m is not None and m.conclusive for m in ratios or [self.speed])


def setting_of(measured: dict[str, Any]) -> Setting:
    """The setting of an entry of a result, or of a difference."""
    return measured["context"], measured["kv_bits"], measured["mtp_kv_bits"]


def settings(found: dict[str, Any]) -> list[Setting]:
    """The settings that were measured, in order."""
    return list(dict.fromkeys(setting_of(entry) for entry in found["entries"]))


def categories(found: dict[str, Any]) -> list[str]:
    """The kinds of prompts that were measured, in order."""
    return list(dict.fromkeys(entry["category"] for entry in found["entries"]))


def rows(found: dict[str, Any], setting: Setting, category: str | None = None) -> list[Row]:
    """Make a row per loop, over all prompts of a setting or those of a category."""
    loops: dict[str, list[dict[str, Any]]] = {}
    for entry in found["entries"]:
        if setting_of(entry) == setting and category in (None, entry["category"]):
            loops.setdefault(entry["contender"], []).append(entry)
    speeds = {name: _speeds(entries) for name, entries in loops.items()}
    return [Row(name, entries, speeds) for name, entries in loops.items()]


def _speeds(entries: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens after the first per second, of all prompts together, round by round; nothing where there are none."""
    rounds = zip(*(zip(e["tokens"], e["seconds"], strict=True) for e in entries), strict=True)
    totals = [(sum(n - 1 for n, _ in prompts), sum(s for _, s in prompts)) for prompts in rounds]
    return [tokens / seconds for tokens, seconds in totals if tokens > 0]
