"""Check a loaded model's rows: several rows of one pass, as a verify reads them, against the same rows alone."""

import math
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.file import fingerprint
from ..cache.layer_cache import CONTEXTS
from ..cache.make_cache import make_prompt_cache
from ..cache.prompt_cache import PromptCache
from ..cache.step_cache import seek
from ..layers.made import Made
from ..machine.errors import first_line, with_type
from ..machine.remembered import RememberedFile, cache_directory
from ..machine.stream import in_turn
from ..tuning.kernel_fallback import Fallback, KernelRefused, run_first
from ..tuning.module_calls import calls_of, equal_rows, first_differing
from ..tuning.row_findings import EVERY, NUMBERS, Findings, RowFinding, file_of_rows, recalled, rows_in_words
from .again import read_kept
from .memory_needs import check_prompt, stated_positions
from .options import default_chunk, token_ids
from .prefill import evaluated, read_chunk

# Maximum difference on a CPU, relative to the greatest magnitude of the rows; on a GPU bits must be equal.
TOLERANCES = {mx.float32: 2**-13, mx.float16: 2**-6, mx.bfloat16: 2**-4}
# What differs if it is no module.
LM_HEAD, OPERATIONS, TAKE_BACK = "the LM head", "an operation outside of modules", "the row after a take-back"
UNPROVEN = "not checked yet, so nothing is drafted: the check runs in idle time, or at once with --check-rows"
LONGEST_PASS = 512  # tokens of a prefill chunk, because a request waits for the current pass
Passes = Generator[None, None, Any]


class RowCheck:
    """The check of one model's rows: a forward pass per `step`, with caches of its own.

    Its findings limit `runtime.rows` and are in the report.

    layout: arguments of `make_prompt_cache`. contexts: positions of the first row, each at least 1 and at most what
    `positions`, the maximum of the model, allows. exact: compare bits, else with TOLERANCES. tokens: of a prompt;
    random ones follow. before: `runtime.rows` without findings. found: findings by context. left_out: contexts that
    are not covered, with the reason.
    """

    def __init__(
        self, model: Any, layout: Mapping[str, Any], contexts: Sequence[int], exact: bool | None, *, recalls: bool
    ):
        """exact: None on a GPU compares bits. recalls: begin with the findings of earlier checks."""
        self._model = weakref.ref(model)  # the model's runtime holds this check: a cycle would delay its release
        self.layout, self.contexts, self.recalls = layout, contexts, recalls
        self.exact = mx.default_device() != mx.cpu if exact is None else exact
        self.tokens: Sequence[int] = ()
        earlier, self.positions = model.runtime.row_check, stated_positions(model)
        self.before = earlier.before if earlier else model.runtime.rows
        self.weights, self.file = fingerprint(model, heads=False), RememberedFile("rows", {}, "")
        self.renew()

    @property
    def model(self) -> Any:
        return self._model()

    def renew(self) -> None:
        """Begin again if other kernels are on than at the last call, with what was found for these."""
        file = file_of_rows(self.model, self.weights, self.layout, exact=self.exact)
        if file.facts != self.file.facts:
            self.file, self.found = file, recalled(file) if self.recalls else Findings()
            self.left_out: dict[int, str] = {}
            self._passes: Any = None
            self._apply()

    @property
    def bases(self) -> list[int]:
        """The positions of the first row, ascending."""
        last = self.positions - EVERY if self.positions else math.inf
        return sorted({int(max(1, min(context, last))) for context in self.contexts})

    @property
    def done(self) -> bool:
        """Whether no pass is left."""
        return self.found.keys() | self.left_out.keys() >= {*self.bases}

    @property
    def due(self) -> bool:
        """Whether idle time is to be used: on a GPU, until it is done."""
        return self.exact and not self.done

    @in_turn()
    def step(self) -> bool:
        """Run the next pass; return whether more are left. An error of MLX's operations ends the check."""
        passes = self._passes = self._passes or self._every()
        try:
            next(passes, None)
        except KernelRefused as e:
            self._passes = None
            Fallback(self.model).take(e, 0)
        except Exception as e:
            self.left_out |= dict.fromkeys(self.bases, with_type(e))
            self._apply()
            raise
        return not self.done

    def pause(self) -> None:
        """Release the caches; the current context begins again with the next step."""
        if self._passes and not self._passes.gi_running:
            self._passes = None

    def _apply(self) -> None:
        """Set `runtime.rows` and the report's line by the findings."""
        proven = self.done and self.found
        most = EVERY if proven or self.before is None else self.before
        rows = max(1, min(most, *(finding.passed for finding in self.found.values()), EVERY))
        self.model.runtime.rows = None if rows == EVERY else rows
        left_out = {context: why for context, why in self.left_out.items() if context not in self.found}
        words = rows_in_words(self.found, left_out, exact=self.exact)
        self.model.runtime.note(rows=words or (UNPROVEN if self.before is not None else ""))

    def _every(self) -> Passes:
        """Yield after each pass; store the finding of each context."""
        found, model, end = self.found, self.model, self.bases[-1] + EVERY
        chunk = min(default_chunk(model), LONGEST_PASS)
        few = f"the maximum is {self.positions} positions"
        why = few if max(self.contexts) > self.bases[-1] else "not requested"
        self.left_out |= dict.fromkeys((context for context in CONTEXTS if context > self.bases[-1]), why)
        cache = make_prompt_cache(model, num_draft_tokens=0, **self.layout)
        text = [token for token in self.tokens if token >= 0][:end]
        text += np.random.default_rng(0).integers(model.vocab_size, size=end - len(text)).tolist()
        for base in (base for base in self.bases if base not in found):
            try:
                check_prompt(model, cache, base - cache.offset, EVERY, chunk, ignore=False)
            except ValueError as e:
                self.left_out[base] = first_line(e)
                self._apply()
                continue
            cache.begin(base)
            while (done := cache.offset) < base:
                read_chunk(model, cache, text[done : min(done + chunk, base)], heads=False, chunk=chunk)
                yield
            most = EVERY if self.positions is None else min(EVERY, self.positions - base)
            finding = yield from self._compared(cache, text[base : base + most])
            if found is not self.found:  # other kernels are on
                return
            found[base] = finding
            self.file.keep(found=found)
            self._apply()

    def _compared(self, cache: PromptCache, tokens: list[int]) -> Passes:
        """Return the finding of passes over the first of these tokens, at the cache's length; the cache stays so."""
        base, passed, differs = cache.offset, 0, ""
        cache.quantize_at(base)
        mark = cache.mark()
        mark.release()  # positions alone take rows back, and states are values
        alone = []
        for i in range(len(tokens)):
            alone.append(self._read(cache, tokens[i : i + 1], base + i))
            yield
        for n in (n for n in NUMBERS if n <= len(tokens)):
            cache.restore_states(mark)
            rows, kept = self._read(cache, tokens[:n], base, device=True), n // 2
            yield
            if not equal_rows(rows, alone[:n], self._same):
                differs = yield from self._differing(cache, mark, tokens[:n])
            elif kept:
                read_kept(self.model, cache, [(base, tokens[:kept])], n)
                row = self._read(cache, tokens[kept : kept + 1], base + kept, device=True)
                differs = "" if equal_rows(row, alone[kept : kept + 1], self._same) else TAKE_BACK
                yield
            if differs:
                break
            passed = n
        cache.restore_states(mark)
        seek(cache.layers, base, base)
        return RowFinding(passed, differs)

    def _read(self, cache: PromptCache, tokens: list[int], position: int, *, device: bool = False) -> list[mx.array]:
        """Read tokens at a position; return their hidden rows, logits and, if the loop uses it, choice, evaluated.

        device: at a position on the device, as a verify does, else at one on the host, as a plain step does.
        """
        seek(cache.layers, mx.array([position]) if device else position, position)
        hidden = self.model.hidden(mx.array([tokens]), cache.layers)
        choice, rows = self.model.choice(hidden) if self.exact else None, [hidden, self.model.logits(hidden)]
        rows += [choice.greedy()[None]] if choice else []
        run_first(self.model)
        evaluated(mx.eval, rows, cache.arrays)
        return rows

    def _same(self, a: mx.array, b: mx.array) -> bool:
        """Return whether arrays are equal: in bits if `exact`, and where integers, else with TOLERANCES."""
        if self.exact or a.dtype not in TOLERANCES:
            return bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)))
        tolerance = max(TOLERANCES[a.dtype], 2.0 ** -(self.layout.get("kv_bits") or math.inf))
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        near = mx.abs(a - b) <= tolerance * mx.where(mx.isfinite(b), mx.abs(b), 0).max()
        return bool(((a == b) | (mx.isnan(a) & mx.isnan(b)) | near).all())

    def _differing(self, cache: PromptCache, mark: Any, tokens: list[int]) -> Passes:
        """Return the path of the first module whose rows differ, or what else differs.

        The first passes compare layers and modules outside of them, the others the modules of the layer found.
        """
        every = {id(module): (path, module) for path, module in self.model.named_modules() if path}.values()
        ids = {id(layer) for layer in self.model.layers}
        layers = [path for path, module in every if id(module) in ids]
        layer_of = {path: next((p for p in layers if path.startswith(f"{p}.")), "") for path, _ in every}
        where = yield from self._search(cache, mark, tokens, {p: m for p, m in every if not layer_of[p]})
        if where in layers:  # with the layer itself, because later layers may call modules of it
            inner = {path: module for path, module in every if where in (path, layer_of[path])}
            where = yield from self._search(cache, mark, tokens, inner)
        return where

    def _search(self, cache: PromptCache, mark: Any, tokens: list[int], modules: dict[str, Any]) -> Passes:
        """Return the path of the first of these modules whose rows differ, or what else differs."""
        base, calls, alone = cache.offset, [], []
        cache.restore_states(mark)
        for i in range(len(tokens)):
            rows, made = calls_of(modules, 1, partial(self._read, cache, tokens[i : i + 1], base + i))
            alone.append(rows[:1])
            calls.append(made)
            yield
        cache.restore_states(mark)
        (hidden, *_), made = calls_of(modules, len(tokens), partial(self._read, cache, tokens, base, device=True))
        other = LM_HEAD if equal_rows([hidden], alone, self._same) else OPERATIONS
        return first_differing(made, calls, self._same) or other


def prepare_rows(model: Any, layout: Mapping[str, Any], exact: bool | None = None) -> None:
    """Apply what earlier checks found about a loaded model's rows; what is left is checked in idle time on a GPU.

    There a made port drafts only after its check. Nothing is checked on several ranks, where a made port therefore
    never drafts on GPUs, or for mlx-lm's own caches. exact: None on a GPU compares bits.
    """
    needed = exact = mx.default_device() != mx.cpu if exact is None else exact
    with suppress(OSError, RuntimeError):
        needed = needed or any(cache_directory("rows").glob("*.json"))
    if exact and issubclass(type(model), Made):
        model.runtime.rows = 1
        model.runtime.note(rows="not checked on several ranks, so nothing is drafted" if model.ranks else UNPROVEN)
    if needed and not model.ranks and not make_prompt_cache(model, num_draft_tokens=0).is_mlx_lm:
        model.runtime.row_check = RowCheck(model, layout, CONTEXTS, exact, recalls=True)


@in_turn()
def check_rows(
    model: Any,
    tokens: Sequence[int] = (),
    *,
    contexts: Sequence[int] = CONTEXTS,
    exact: bool | None = None,
    **layout: Any,
) -> Findings:
    """Check that rows read in one pass equal the same rows read alone; return a `RowFinding` by context.

    From now on passes have at most the rows that are equal at each context: `model.report` lists them. Nothing is
    checked, and {} returned, for a family that is decoded without drafts.

    tokens: a text's tokens, from which the rows are taken. contexts: positions of the first row, limited by the
    model's. exact: compare bits (None: on a GPU), else within rounding. layout: arguments of `make_prompt_cache`.
    Raises ValueError on several ranks, and for a wrong argument.
    """
    if model.ranks:
        raise ValueError(f"check_rows: not on {model.ranks.size} ranks")
    if not contexts or not all(type(context) is int and context >= 0 for context in contexts):
        raise ValueError(f"contexts={contexts}: allowed are one or more numbers of tokens")
    tokens = token_ids(tokens, model.vocab_size, pictures=True) if len(tokens) else ()
    if make_prompt_cache(model, num_draft_tokens=0, **layout).is_mlx_lm:
        return {}
    check = model.runtime.row_check = RowCheck(model, layout, contexts, exact, recalls=False)
    check.tokens = tokens
    while check.step():
        pass
    return check.found
