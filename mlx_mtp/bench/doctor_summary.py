"""Summarise each kernel: whether it compiled and is right, its ratio and alternative, and what was not checked."""

from collections.abc import Iterable
from typing import Any

from ..emulator.texts import recorded
from ..tuning.ab_test import FAILS, KernelTrial
from ..tuning.kernel_verdict import WORDS
from .compile_jobs import OPS as KERNELS

Found = dict[str, Any]
NOT_TOLD = "not reported by MLX"
REGISTERS = "registers (maxTotalThreadsPerThreadgroup): MLX does not expose them"
NO_CASE = "compiled, right, ratio: no case launches it; `mlx-mtp doctor --compile-only` compiles it"
NOT_ASKED = "compiled, right, ratio: no op of --op launches it"
NO_GPU = "Apple's compiler, ratio: no Metal GPU, kernels are emulated"
BITS_ONLY, WRONG, FAILED = "ratio: --bits-only measures no times", "ratio: it is wrong", "ratio: it failed"


def launched(trial: KernelTrial) -> list[str]:
    """Return the kernels that a trial's op launches; call it last, because it leaves zeros in the trial's arrays."""
    with recorded() as found:
        trial.pairs[0][0](trial.x(0))
    return sorted({each.text.kernel for each in found} & {*KERNELS})


def by_kernel(found: Found) -> list[Found]:
    """Summarise a report for each kernel, over every op, shape and row count that launches it."""
    lines = [*found["kernels"].get("found", ()), *found.get("facts", {}).get("found", ())]
    own = {name: [k for k in lines if name in k.get("kernels", [k["op"]])] for name in KERNELS}
    return [_of_kernel(name, of, found) for name, of in own.items()]


def _of_kernel(name: str, lines: list[Found], found: Found) -> Found:
    """Summarise the lines of one kernel; None for values that were not checked."""
    failed = [k for k in lines if "failed" in k or (k["wrong"] or "").startswith(FAILS)]
    wrong = [k for k in lines if k.get("wrong") and k not in failed]
    ratios = [k["ratio"] for k in lines if k.get("ratio") is not None]
    spellings = {k["spelling"] for k in lines if "spelling" in k}
    why = BITS_ONLY if found.get("bits_only") else FAILED if failed else WRONG
    not_timed = [why] if found["metal"] and lines and not ratios else []
    return {
        "kernel": name,
        "checked_as": sorted({k["op"] for k in lines}),
        "compiled": not failed if found["metal"] and lines else None,
        "right": not (failed or wrong) if lines else None,
        "ratio": [min(ratios), max(ratios)] if ratios else None,
        "alternative": {"multiply_adds": ", ".join(_words(spellings))} if spellings else None,
        "registers": NOT_TOLD,
        "not_checked": [REGISTERS, *_not_checked(found, bool(lines)), *not_timed],
    }


def _words(spellings: Iterable[str]) -> list[str]:
    return sorted(WORDS.get(each, "as compiled") for each in spellings)


def _not_checked(found: Found, any_line: bool) -> list[str]:
    """Return the parts of a kernel's check that a report lacks, except its time."""
    if reason := found["kernels"].get("not_checked"):
        return [reason]
    missing = [] if any_line else [NOT_ASKED if found.get("op") else NO_CASE]
    return missing if found["metal"] else [*missing, NO_GPU]
