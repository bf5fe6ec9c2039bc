"""Define a kernel's verdict, on or off with a reason, and format verdicts for reports."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..kernels.contraction import AS_COMPILED
from .verdict_file import TrialFinding, VerdictKey

MARGIN = 1.02  # minimum ratio; 77 of 80 trials of equal sides on a busy CPU stayed below
AS_ROWS = "as M="  # prefix of the reason if another row count of the shape was timed instead
SPLIT, TOGETHER = "rows split", "rows together"
WORDS = {"SEPARATE": "separate", "FUSED": "fused", "FUSED_ACROSS": "fused across statements"}
SPELLED_OUT = "multiply-adds spelled out, as the compiler's differ from those of MLX's library"
MLX_IS = {"slower": "faster", "no faster": "as fast"}  # reasons of an exact kernel that is off, as seen from MLX


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a kernel is on, and why.

    right: whether a check passed; False if not tried. ratio: time of MLX's operations over the kernel's, None if not
    timed. spelling: of its multiply-adds during the trial. split: whether it splits the rows.
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


def judged(found: TrialFinding) -> KernelVerdict:
    """Return the verdict on a kernel that is wrong or was timed: on if it is right and faster by MARGIN."""
    if found.ratio is None:
        return off(found.wrong or "")
    reason = "" if found.ratio > MARGIN else "slower" if found.ratio < 1 else "no faster"
    return KernelVerdict(not reason, True, found.ratio, reason, split=found.split)


def off(reason: str) -> KernelVerdict:
    """Return the verdict off with this reason, for a kernel that has not passed a check."""
    return KernelVerdict(False, False, reason=reason)


def in_words(verdicts: Mapping[VerdictKey, KernelVerdict]) -> tuple[str, ...]:
    """Return a line per op and shape: "verify_qmm 8x16 4-bit: M=2-5 on (1.31-1.80x), M=6-8 MLX's own (faster)".

    The line of `contractions_in_words` follows, if there is one.
    """
    shapes: dict[tuple[str, str], list[tuple[int, KernelVerdict]]] = {}
    for (op, shape, rows), verdict in verdicts.items():
        shapes.setdefault((op, shape), []).append((rows, verdict))
    lines = (f"{op} {shape}: {_ranges(sorted(found))}" for (op, shape), found in shapes.items())
    return *lines, *contractions_in_words({op: v.spelling for (op, *_), v in verdicts.items() if v.right})


def contractions_in_words(spellings: Mapping[str, str]) -> tuple[str, ...]:
    """Return a tuple of one line that lists the ops whose multiply-adds are spelled out; () if there are none."""
    found = [f"{op} {WORDS[spelling]}" for op, spelling in spellings.items() if spelling in WORDS]
    return (f"{SPELLED_OUT}: {', '.join(found)}",) if found else ()


def _ranges(found: list[tuple[int, KernelVerdict]]) -> str:
    """Format the verdicts of one shape; neighbouring row counts whose verdicts differ only in numbers are merged."""
    parts = []
    for _, group in itertools.groupby(enumerate(found), key=_kind):
        rows, verdicts = zip(*(item for _, item in group), strict=True)
        span = f"M={rows[0]}" if len(rows) == 1 else f"M={rows[0]}-{rows[-1]}"
        ratios = sorted(verdict.ratio for verdict in verdicts if verdict.on and verdict.ratio is not None)
        why = verdicts[0].reason
        if ratios:
            why = "-".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))) + "x"
        why += f", {SPLIT}" if verdicts[0].on and verdicts[0].split else ""
        state = f"MLX's own ({MLX_IS[why]})" if why in MLX_IS else f"{'on' if verdicts[0].on else 'off'} ({why})"
        parts.append(f"{span} {state}")
    return ", ".join(parts)


def _kind(item: tuple[int, tuple[int, KernelVerdict]]) -> tuple[bool, bool, str, int]:
    """Return the key by which neighbours are merged; its last number is equal for consecutive row counts."""
    place, (rows, verdict) = item
    reason = "" if verdict.reason.startswith(AS_ROWS) else verdict.reason  # its ratio is that of its neighbours
    return verdict.on, verdict.on and verdict.split, re.sub(r"\d+", "#", reason), rows - place
