"""Summarise each kernel: whether it compiled and is right, its ratio and alternative, and what was not checked."""

from typing import Any

import mlx.core as mx

from ..emulator.texts import RecordedLaunch, recorded
from ..kernels import on_metal
from ..tuning.ab_test import FAILS, KernelTrial
from ..tuning.kernel_verdict import WORDS
from .compile_child import most_threads
from .compile_jobs import OPS as KERNELS

Result = dict[str, Any]
NOT_TOLD = "not reported by MLX"
REGISTERS = "registers: MLX does not report the pipeline's maxTotalThreadsPerThreadgroup"
NO_CASE = "compiled, right, ratio: no case launches it; `mlx-mtp doctor --compile-only` compiles it"
NOT_ASKED = "compiled, right, ratio: no op of --op launches it"
NO_GPU = "Apple's compiler, ratio, choice of an alternative: no Metal GPU, kernels are emulated"
BITS_ONLY = "ratio, choice of an alternative: --bits-only measures no times"
WRONG, FAILED = "ratio: it is wrong", "ratio: it failed"


def launched(trial: KernelTrial) -> Result:
    """Describe the launches of a trial's op; call it last, because it leaves zeros in the trial's arrays.

    kernels: names of the launched kernels. splits: those whose text differs if rows are split. most_threads: maximum
    threads per group by kernel, for the kernels for which MLX reports it.
    """
    whole, of_split = (_launches(each) for each in (trial, trial.of_split()))
    splits = {a.text.kernel for a, b in zip(whole, of_split, strict=True) if a.text != b.text}
    most = {each.text.kernel: _most_threads(each) for each in whole}
    reported = {kernel: threads for kernel, threads in most.items() if threads}
    return {"kernels": sorted(most), "splits": sorted(splits), "most_threads": reported}


def _launches(trial: KernelTrial) -> list[RecordedLaunch]:
    with recorded() as found:
        trial.pairs[0][0](trial.x(0))
    return [each for each in found if each.text.kernel in KERNELS]


def _most_threads(launch: RecordedLaunch) -> int | None:
    if not on_metal():
        return None
    kernel: Any = mx.fast.metal_kernel(**launch.kernel)
    return most_threads(kernel, launch.call)


def every_kernel(found: Result) -> list[Result]:
    """Return the lines of a report for all kernels: of its part "kernels", then of "facts" (the model's shapes)."""
    return [*found["kernels"].get("found", ()), *found.get("facts", {}).get("found", ())]


def by_kernel(found: Result) -> list[Result]:
    """Return a list with a summary of each kernel of KERNELS, over every op, shape and row count that launches it.

    found: the report. If none of its lines launches a kernel, the results in that kernel's summary are None.
    """
    lines = every_kernel(found)
    own = {name: [k for k in lines if name in k.get("kernels", [k["op"]])] for name in KERNELS}
    return [_of_kernel(name, of, found) for name, of in own.items()]


def _of_kernel(name: str, lines: list[Result], found: Result) -> Result:
    """Return a dict that summarises the lines of one kernel of the report `found`; None for values not checked."""
    failed = [k for k in lines if "failed" in k or (k["wrong"] or "").startswith(FAILS)]
    wrong = [k for k in lines if k.get("wrong") and k not in failed]
    ratios = [k["ratio"] for k in lines if k.get("ratio") is not None]
    why = BITS_ONLY if found.get("bits_only") else FAILED if failed else WRONG
    not_timed = [why] if found["metal"] and lines and not ratios else []
    threads = sorted({k["most_threads"][name] for k in lines if name in k.get("most_threads", ())})
    return {
        "kernel": name,
        "checked_as": sorted({k["op"] for k in lines}),
        "compiled": not failed if found["metal"] and lines else None,
        "right": not (failed or wrong) if lines else None,
        "ratio": [min(ratios), max(ratios)] if ratios else None,
        "alternative": _alternative([k for k in lines if name in k.get("splits", ())], lines),
        "registers": {"most_threads_per_group": [threads[0], threads[-1]]} if threads else NOT_TOLD,
        "not_checked": [*([] if threads else [REGISTERS]), *_not_checked(found, bool(lines)), *not_timed],
    }


def _alternative(of_split: list[Result], lines: list[Result]) -> Result | None:
    """Return a dict: how multiply-adds are spelled, and the row counts M at which rows are split, or are together.

    None if nothing of it is known. of_split: those of `lines` whose kernel has the two alternatives.
    """
    found = {}
    if spellings := {k["spelling"] for k in lines if "spelling" in k}:
        found["multiply_adds"] = ", ".join(sorted(WORDS.get(each, "as compiled") for each in spellings))
    for name, split in (("rows_split", True), ("rows_together", False)):
        if rows := sorted({k["rows"] for k in of_split if k.get("split") is split}):
            found[name] = rows
    return found or None


def _not_checked(found: Result, any_line: bool) -> list[str]:
    """Return the parts of a kernel's check that a report lacks, except its time."""
    if reason := found["kernels"].get("not_checked"):
        return [reason]
    missing = [] if any_line else [NOT_ASKED if found.get("op") else NO_CASE]
    return missing if found["metal"] else [*missing, NO_GPU]
