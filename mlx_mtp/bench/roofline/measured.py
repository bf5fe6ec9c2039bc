"""Take measured times of each phase from a result of `bench decode`, `bench verify` or `bench profile`."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..rows import rows, settings
from ..timing import measured as interval
from .floor import CYCLE, DRAFT, PLAIN, VERIFY

Found = dict[str, Any]
Time = tuple[str, int, str, float]  # phase, rows M, side, seconds
NEAR = 256  # tokens, which change no floor by much; prompts differ in length, and a profile does not tell its own
KINDS = ("decode", "verify", "profile")


def contexts(found: Found) -> list[int]:
    """List the contexts (tokens) that a result has times at; about the middle of a text where prompts were short."""
    match found["bench"]:
        case "decode":
            return list(dict.fromkeys(_context(found, setting[0]) for setting in settings(found)))
        case "verify":
            return [curve["context"] for curve in found["curves"] if curve["name"] == "whole"]
        case "profile":
            return [found["options"]["context"] or found["tokens"] // 2]
    raise ValueError(f"measured: a result of bench {found['bench']}; allowed are {', '.join(KINDS)}")


def times(found: Found, context: int) -> list[Found]:
    """Take the result's times at one of its `contexts`: phase, rows M of the verify, drafts k, side, seconds."""
    taken = {"decode": _decode, "verify": _verify, "profile": _profile}[found["bench"]](found, context)
    return [{"phase": p, "rows": m, "drafts": m - 1, "side": side, "seconds": s} for p, m, side, s in taken]


def nearest(found: Found, context: int) -> int:
    """Choose the result's context that is meant: within NEAR tokens, or a tenth; ValueError where none is."""
    known = contexts(found)
    near = min(known, key=lambda other: abs(other - context))
    if abs(near - context) > max(NEAR, context / 10):
        tokens = ", ".join(map(str, known))
        raise ValueError(f"context={context}: bench {found['bench']} was measured at {tokens} tokens")
    return near


def _context(found: Found, asked: int) -> int:
    """Count prompt and half of the text where no context was asked for."""
    entries = [e for e in found["entries"] if e["context"] == asked]
    length = sum(e["prompt_tokens"] + sum(e["tokens"]) / len(e["tokens"]) / 2 for e in entries) / len(entries)
    return asked or round(length)


def _decode(found: Found, context: int) -> Iterator[Time]:
    """Take whole cycles of the loop, host included."""
    for setting in settings(found):
        if _context(found, setting[0]) == context and setting[1:] == (None, None):
            for row in rows(found, setting):
                if row.speed and row.contender in ("plain", "mlx-lm"):
                    yield PLAIN, 1, "loop" if row.contender == "plain" else "mlx-lm's loop", 1 / row.speed.median
                elif row.speed and row.contender.startswith("k="):
                    assert row.tokens_per_cycle
                    yield CYCLE, int(row.contender[2:]) + 1, "loop", row.tokens_per_cycle / row.speed.median


def _verify(found: Found, context: int) -> Iterator[Time]:
    whole = [curve for curve in found["curves"] if (curve["name"], curve["context"]) == ("whole", context)]
    for side, seconds in (pair for curve in whole for pair in curve["seconds"].items()):
        for m, values in seconds.items():
            yield PLAIN if int(m) == 1 else VERIFY, int(m), f"{side} pass", interval(values).median


def _profile(found: Found, _: int) -> Iterator[Time]:
    """Take phases one after the other; a verify with what its acceptance takes, a cycle with the host in between."""
    rows, cycles = found["options"]["k"] + 1, max(1, found["cycles"])
    parts: dict[str, Sequence[float]] = {name: s for name, s in found["seconds"].items() if name != "prefill"}
    verify = [a + b for a, b in zip(parts["verify"], parts["accept"], strict=True)]
    whole = [sum(values) for values in zip(*parts.values(), strict=True)]
    if rows > 1:
        yield DRAFT, rows, "profile", interval(parts["draft"]).median / cycles
    yield PLAIN if rows == 1 else VERIFY, rows, "profile", interval(verify).median / cycles
    yield CYCLE, rows, "profile", interval(whole).median / cycles
