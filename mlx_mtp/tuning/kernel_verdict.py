"""Say of a kernel whether it is on, and why, and say it of all kernels in a report's lines."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..kernels.contraction import AS_COMPILED
from .verdict_file import Found, Key

MARGIN = 1.02  # of 80 trials of a thing with itself, on a busy CPU, 77 stayed below
AS_ROWS = "as M="  # begins why a kernel is on that was not timed, but another number of rows of its shape
SPLIT, TOGETHER = "rows split", "rows together"
WORDS = {"SEPARATE": "separate", "FUSED": "fused", "FUSED_ACROSS": "fused across statements"}
SPELLED_OUT = "multiply-adds spelled out, as the compiler's differ from those of MLX's library"
MLX_IS = {"slower": "faster", "no faster": "as fast"}  # than a kernel that is right, and off


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a kernel is on.

    right: seen to be. ratio: stock MLX's time over the kernel's, None if not timed. reason: why it is as it is.
    spelling: of multiply-adds, when it was tried. split: whether it is to split the rows.
    """

    on: bool
    right: bool
    ratio: float | None = None
    reason: str = ""
    spelling: str = AS_COMPILED
    split: bool = False

    def __str__(self) -> str:
        timed = ("" if self.ratio is None else f", {self.ratio:.2f}x") + (f", {SPLIT}" if self.split else "")
        if self.on:
            return f"on{timed or f' ({self.reason})'}"
        return f"off: {self.reason}{timed}"


def judged(found: Found) -> KernelVerdict:
    """Judge by a finding that was timed, or wrong."""
    if found.ratio is None:
        return off(found.wrong or "")
    on = found.ratio > MARGIN
    return KernelVerdict(
        on, True, found.ratio, "" if on else "slower" if found.ratio < 1 else "no faster", split=found.split
    )


def off(reason: str) -> KernelVerdict:
    """Leave a kernel off that was not seen to be right."""
    return KernelVerdict(False, False, reason=reason)


def in_words(verdicts: Mapping[Key, KernelVerdict]) -> tuple[str, ...]:
    """Say verdicts, a line per op and shape: "verify_qmm 8x16 4-bit: M=2-5 on (1.31-1.80x), M=6-8 off (slower)"."""
    shapes: dict[tuple[str, str], list[tuple[int, KernelVerdict]]] = {}
    for (op, shape, rows), verdict in verdicts.items():
        shapes.setdefault((op, shape), []).append((rows, verdict))
    lines = (f"{op} {shape}: {_ranges(sorted(found))}" for (op, shape), found in shapes.items())
    return *lines, *contractions_in_words({op: v.spelling for (op, *_), v in verdicts.items() if v.right})


def contractions_in_words(spellings: Mapping[str, str]) -> tuple[str, ...]:
    """Name in a line the ops whose multiply-adds are not left to the compiler, if there are any."""
    found = [f"{op} {WORDS[spelling]}" for op, spelling in spellings.items() if spelling in WORDS]
    return (f"{SPELLED_OUT}: {', '.join(found)}",) if found else ()


def _ranges(found: list[tuple[int, KernelVerdict]]) -> str:
    """Say the verdicts of one shape, neighbouring row counts together where they differ in numbers only."""
    texts = []
    for _, group in itertools.groupby(enumerate(found), key=_kind):
        rows, verdicts = zip(*(item for _, item in group), strict=True)
        span = f"M={rows[0]}" if len(rows) == 1 else f"M={rows[0]}-{rows[-1]}"
        ratios = sorted(verdict.ratio for verdict in verdicts if verdict.on and verdict.ratio is not None)
        why = verdicts[0].reason
        if ratios:
            why = "-".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))) + "x"
        why += f", {SPLIT}" if verdicts[0].on and verdicts[0].split else ""
        own = MLX_IS.get(why)
        texts.append(f"{span} MLX's own ({own})" if own else f"{span} {'on' if verdicts[0].on else 'off'} ({why})")
    return ", ".join(texts)


def _kind(item: tuple[int, tuple[int, KernelVerdict]]) -> tuple[bool, bool, str, int]:
    """Give what neighbours have in common; the last number is that of a run of row counts without a gap."""
    place, (rows, verdict) = item
    reason = "" if verdict.reason.startswith(AS_ROWS) else verdict.reason  # it has the ratio of those beside it
    return verdict.on, verdict.on and verdict.split, re.sub(r"\d+", "#", reason), rows - place
