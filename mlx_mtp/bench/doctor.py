"""Examine a machine: correctness and speed of its kernels, and the gain of drafting.

The parts run in sequence. A part that fails is reported with the first line of its error, and the others still run.
Without a Metal GPU kernels are checked in the emulator on small shapes and not timed.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import mlx.core as mx

from ..cache.layer_cache import CONTEXTS
from ..decoding.options import default_chunk, default_draft_tokens
from ..decoding.row_check import check_rows
from ..emulator.compile import find_clang
from ..kernels import matrix_orders, on_metal
from ..kernels.contraction import spelling
from ..machine.errors import first_line, with_type
from ..tuning.ab_test import FAILS, KernelTrial, check, compile_kernel, time_pair
from ..tuning.kernel_fallback import failed_kernels
from ..tuning.kernel_switch import more_trials, trials
from ..tuning.kernel_trials import check_split, faster
from ..tuning.kernel_verdict import SPLIT, TOGETHER
from . import decode, emulated_check, profile, profile_report, result, verify
from .compile_jobs import lacking, type_name
from .doctor_page import PARTS
from .doctor_summary import by_kernel, launched
from .kernels_cases import CASES, SMALL, in_type
from .result import gpu_cores, thermal_state
from .subject import Subject, make_prompts

FORMAT = 1
ROWS = tuple(range(1, 9))
LONG = (12, 16)  # rows of long drafts whose kernels are checked, the maximum of each compiled count
CONTEXT, ROUNDS, DRAFTS = 128, 3, 3
CATEGORIES, MAX_TOKENS = ("code_python", "explain_concept"), 48
OPS = tuple(SMALL)
TYPES = (mx.bfloat16, mx.float16, mx.float32)  # the most common first
Progress = Callable[[str], None]
Result = dict[str, Any]


def examine(subject: Subject, progress: Progress) -> Result:
    """Run all parts and return their results, ready for JSON; the model must have been loaded without kernels.

    progress: receives each part's name before it starts. A failed part has only "failed": its error's type and first
    line.
    """
    tic, before, examined = time.time(), thermal_state(), ExaminedModel(subject)
    found: Result = {"doctor": FORMAT, "environment": {**result.environment(), "gpu_cores": gpu_cores()}}
    found["metal"] = on_metal()
    parts: dict[str, Callable[[], Result]] = {"kernels": partial(_every, progress), "matrix_unit": matrix_unit}
    parts |= {name: getattr(examined, name) for name in ("facts", "rows", "verify", "decode", "host")}
    for name, run in parts.items():
        progress(PARTS[name])
        found[name] = _or_why({}, run)
    found["refused"] = [list(failed) for failed in failed_kernels(subject.model)]
    found["thermal"] = {"before": before, "after": thermal_state()}
    return _ended(found, tic)


def examine_bits(ops: Sequence[str], progress: Progress) -> Result:
    """Check the results of these ops (none: all) on small shapes, without times, and return a report.

    They run on the GPU in each type that it supports, else emulated in one type; without a GPU and a clang for the
    emulator nothing is checked, and the report states that.
    """
    tic = time.time()
    found: Result = {"doctor": FORMAT, "bits_only": True, "op": [*ops], "environment": result.environment()}
    found["metal"] = on_metal()
    found["kernels"] = _or_why({}, partial(_small, ops or tuple(SMALL), progress))
    found["matrix_unit"] = _or_why({}, matrix_unit)
    return _ended(found, tic)


def _ended(found: Result, tic: float) -> Result:
    """Return a report with its summary by kernel (unless the part "kernels" failed), duration and date added."""
    if "failed" not in found["kernels"]:
        found["every_kernel"] = by_kernel(found)
    return found | {"seconds": time.time() - tic, "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime(tic))}


def _or_why(line: Result, run: Callable[[], Result]) -> Result:
    """Return a copy of a line with the result of `run` added.

    If `run` raises, "failed" is added instead: the error's type and first line.
    """
    try:
        return line | run()
    except Exception as e:  # any type: the other parts still run
        return line | {"failed": with_type(e)}


def _every(progress: Progress) -> Result:
    """Check every op: on the GPU, timed, on released models' shapes; else emulated on small ones, if clang exists."""
    if not on_metal():
        return _emulated(tuple(SMALL), progress)
    missing, found = lacking(), []
    dtype = next(each for each in TYPES if type_name(each) not in missing)
    with in_type(dtype):
        for name, (op, make) in CASES.items():
            progress(f"{op}: {name}")
            found += on_gpu(name, op, lambda make=make: [make()], dtype)
    return {"found": found, "types_not_supported": missing}


def _small(ops: Sequence[str], progress: Progress) -> Result:
    """Check some ops on small shapes, without times."""
    if not on_metal():
        return _emulated(ops, progress)
    missing, found = lacking(), []
    for op, dtype in itertools.product(ops, TYPES):
        if type_name(dtype) not in missing:
            progress(f"{op}, {type_name(dtype)}")
            with in_type(dtype):
                found += on_gpu(f"small {op}", op, lambda op=op: [SMALL[op]()], dtype, timed=False)
    return {"found": found, "types_not_supported": missing}


def _emulated(ops: Sequence[str], progress: Progress) -> Result:
    try:
        find_clang()
    except ValueError as e:
        return {"found": [], "not_checked": f"kernels not checked: {first_line(e)}"}
    found: list[Result] = []
    for op in ops:
        progress(f"{op}, emulated")
        found.append(_or_why({"op": op}, partial(emulated_check.of_op, op)))
    return {"found": found}


def matrix_unit() -> Result:
    """Return "orders", how the GPU's matrix unit adds products, by type; or "not_read", why this is not known."""
    if missing := lacking():  # the probe is one text for all types
        return {"not_read": f"the GPU does not support {', '.join(missing)}"}
    orders = {dtype: order._asdict() for dtype, order in matrix_orders().items()}
    return {"orders": orders} if orders else {"not_read": "no Metal GPU"}


def on_gpu(
    name: str, op: str, build: Callable[[], Sequence[Any]], dtype: mx.Dtype, timed: bool = True
) -> Iterator[Result]:
    """Yield a line for each kernel and row count of the sites that `build` returns: checked and, if `timed`, timed.

    name: of the shape, for reports. A failure is a line with "failed".
    """
    try:
        sites = build()
        made = [*trials(sites, dtype), *(t for t in more_trials(sites, dtype) if t.rows in LONG)]
    except Exception as e:
        yield {"of": name, "op": op, "failed": with_type(e)}
        return
    for trial in made:
        line = {"of": name, "op": trial.op, "shape": trial.shape, "rows": trial.rows}
        line = _or_why(line, partial(tried, trial, timed))
        yield _or_why(line, partial(launched, trial))
    mx.clear_cache()


def tried(trial: KernelTrial, timed: bool = True) -> Result:
    """Compile and check one kernel, and time it if it is right and `timed`.

    wrong: what is wrong, or None. ratio: stock MLX's time over the kernel's, None if not timed. For a kernel that may
    split its rows, split, if timed: whether that is faster or alone runs; refused: by name, why just one of the two
    alternatives does not run.
    """
    tic = time.perf_counter()
    for each in (trial, trial.of_split())[: 2 if trial.split else 1]:
        compile_kernel(each)
    compiled = time.perf_counter() - tic
    wrong, only_split = check_split(trial)
    found: Result = {"spelling": spelling(trial.op), "compile_seconds": compiled, "ratio": None}
    if trial.split:
        reasons = {
            TOGETHER: check(trial.chosen(False)) if only_split else wrong,
            SPLIT: wrong if only_split else check(trial.of_split()),
        }
        failed = {name: why for name, why in reasons.items() if why and why.startswith(FAILS)}
        other = next((f"{name}: {why}" for name, why in reasons.items() if why and name not in failed), None)
        wrong, found["refused"] = wrong or other, failed if len(failed) == 1 else {}
    if timed and not wrong:
        found["ratio"], split = faster(trial, only_split, time_pair)
        found |= {"split": split} if trial.split else {}
    return found | {"wrong": wrong}


class ExaminedModel:
    """The examined model, with the kernels that trials switch on."""

    def __init__(self, subject: Subject):
        self.subject, self.model = subject, subject.model

    @cached_property
    def kernels(self) -> verify.Kernels:
        """The model's kernels, tried at the first access; those that are right and faster are on."""
        return verify.Kernels(self.model, None)

    def facts(self) -> Result:
        """Return the model's facts, with the report of its kernels as "kernels".

        "found" is the check of these kernels on the model's own shapes; [] without a Metal GPU.
        """
        own, kernels = [], self.kernels
        if on_metal():
            own = list(on_gpu("the model", "its kernels", lambda: kernels.sites, self.model.no_hidden().dtype))
        return {**self.subject.facts, "kernels": list(kernels.words), "found": own}

    def rows(self) -> Result:
        """Return the findings of `check_rows` in words, with the kernels of `facts`; on a CPU only at context 0."""
        check_rows(self.model, contexts=CONTEXTS if mx.default_device() != mx.cpu else CONTEXTS[:1])
        return {"words": self.model.report.rows}

    def verify(self) -> Result:
        """Return a result of `bench verify` on the whole model alone: 1 to 8 rows, stock and with the kernels."""
        text = verify.text_of(self.subject, CONTEXT)
        plan = verify.CurvePlan(ROWS, (CONTEXT,), ROUNDS)
        curve = next(verify.measure(self.model, text, self.kernels, plan, default_chunk(self.model)))
        return result.result("verify", self.subject.facts, {"rows": ROWS, "rounds": ROUNDS}, curves=[curve])

    def decode(self) -> Result:
        """Return a result of `bench decode`, of two prompts; its "differences" are those of `decode.broken`."""
        session = decode.open_session(self.subject, (), ROUNDS, 0.0)
        prompts = make_prompts(self.subject.tokenizer, self.model.vocab_size, each=1, only=CATEGORIES)
        given = {"stop_tokens": self.subject.stop_tokens, "prefill_step_size": default_chunk(self.model)}
        settings = decode.LoopSettings(max_tokens=MAX_TOKENS, **given)
        decode.measure(session, prompts, settings, lambda *_: None)
        found = decode.as_result(session, {"max_tokens": MAX_TOKENS})
        return {**found, "differences": decode.broken(found)}

    def host(self) -> Result:
        """Return a result of `bench profile`: a cycle's phases, waiting for each, and the host's work in between."""
        (prompt,) = make_prompts(self.subject.tokenizer, self.model.vocab_size, each=1, only=CATEGORIES[:1])
        k = min(DRAFTS, default_draft_tokens(self.model))
        work = profile.Workload(self.model, prompt.tokens, MAX_TOKENS, k, default_chunk(self.model))
        return result.result("profile", self.subject.facts, {"k": k}, **profile_report.profiled(work, ROUNDS))
