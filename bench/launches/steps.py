"""Count launches of a layer's verify, a cycle and a plain step, for mlx-lm, stock modules and our kernels.

Counts are of graphs of the families at their real depth in tiny widths, quantized to 4 bits (see `graph.py`). The
functions compiled by mlx-lm count as mx.compile fuses them; views do not count, but copies of them do; MLX's fused
norms, RoPE and attention count one each. A layer is the difference to the graph without it. mlx-lm: its own model and
caches, at one row, as it decodes; stock: our loop with mlx-lm's modules. A cycle drafts rows - 1 tokens and verifies
them.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_make_prompt_cache

from mlx_mtp.bench.decode import twin
from mlx_mtp.bench.roofline.cost import KERNELS
from mlx_mtp.cache.make_cache import make_prompt_cache
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.step import step
from mlx_mtp.layers import gated_delta
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.plan import Plan

from .graph import total
from .models import MODELS, WIDTH

Count = Callable[[Callable[..., Any], Callable[[], Sequence[mx.array]]], int]


def make(build: Callable[[], Any]) -> Any:
    model = build()
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def at_rest(model: Any, rows: int) -> PromptCache:
    """Return caches after a prompt; the heads have read all but its last row."""
    cache, tokens = make_prompt_cache(model), [1] * rows
    cache.reserve(64)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    cache.tokens = tokens
    cache.push(hidden)
    if drafter := drafter_of(model):
        drafter.read(model, cache, tokens, 0, rows - 1, step=rows)
    return cache


def reached(model: Any, rows: int) -> PromptCache:
    """Return caches after a prompt and a verify whose last drafts were rejected; the heads have read all rows.

    Recurrent caches hold a tape, as on a Mac, instead of the states that a CPU keeps.
    """
    cache, tokens = at_rest(model, rows), [1] * rows
    cache.to_device()
    if cache.heads:
        cache.resume_heads(rows - 1)
    _seek(cache.layers, rows, rows)
    with mock.patch.object(gated_delta, "KEPT", 0):
        model.hidden(mx.array(tokens)[None], cache.layers)
    _seek(cache.layers, rows + 1, 2 * rows)
    mx.eval(cache.arrays)
    return cache


def _seek(caches: list[Any], offset: int, limit: int) -> None:
    at = mx.array([offset])
    for cache in caches:
        cache.seek(at, limit)


class StartState:
    """A model's caches after a prompt and a verify of `rows` rows, restored before each `count`."""

    def __init__(self, model: Any, rows: int, count: Count = total):
        with mock.patch.object(mx, "eval"):  # only the shapes of the caches are used
            cache = reached(model, rows)
        blank = {id(part): mx.zeros_like(part) for c in cache.caches for part in c.parts}  # layers share positions
        for c in cache.caches:
            c.parts = tuple(blank[id(part)] for part in c.parts)
        mx.eval(cache.arrays)
        self.model, self.rows, self.cache, self.mark, self.count = model, rows, cache, cache.mark(), count

    def restored(self) -> PromptCache:
        self.cache.restore(self.mark)
        return self.cache

    def up_to(self, last: int) -> int:
        """Return the launches of a verify by all layers up to `last`."""
        return self.count(partial(self._run, last), self._zeros)

    def _zeros(self) -> list[mx.array]:
        self.restored()
        x = mx.zeros((1, self.rows, WIDTH), mx.bfloat16)
        mx.eval(x)
        return [x]

    def _run(self, last: int, x: mx.array) -> list[mx.array]:
        masks: dict[Any, Any] = {}
        caches = self.cache.layers[: last + 1]
        for layer, kv in zip(self.model.layers[: last + 1], caches, strict=True):
            if kv.window not in masks:
                masks[kv.window] = kv.make_mask(self.rows, return_array=True)
            x = layer(x, mask=masks[kv.window], cache=kv)
        return [x, *(part for kv in caches for part in kv.parts)]


def cycle_of(model: Any, rows: int) -> tuple[Callable[..., list[mx.array]], list[mx.array]]:
    """Return a function for a cycle that drafts rows - 1 tokens, and its arguments; rows = 1 is a plain step."""
    return partial(built, model, StartState(model, 4).cache), _before(rows)


def _before(rows: int) -> list[mx.array]:
    arrays = [mx.zeros((1, rows, WIDTH), mx.bfloat16), mx.zeros((1, rows), mx.int32), mx.zeros(1, mx.int32)]
    mx.eval(arrays)
    return arrays


def built(model: Any, cache: PromptCache, hidden: mx.array, tokens: mx.array, accepted: mx.array) -> list[mx.array]:
    """Return all arrays of a cycle after rows that ended at position 4, with the same number of drafts."""
    plan, drafter = Plan(k=tokens.size - 1), drafter_of(model)
    frame = Frame(model, cache, plan, drafter if plan.k else None, (Single(Picker()),), base=4)
    run, _ = step(frame, Run(hidden, tokens, accepted), cache.unload())
    return [run.packed, *cache.arrays]


EVERY_OP = [op for ops in KERNELS.values() for op in ops]
CYCLE = "a plain step, a cycle"
MLX_LM = "mlx-lm"
Pair = tuple[int, int]


class MlxLm:
    """mlx-lm's own model and caches after a prompt, restored before each `count` of a one-row step."""

    def __init__(self, model: Any, count: Count = total):
        self.model, self.count = twin(model), count
        self.caches = mlx_lm_make_prompt_cache(self.model)
        self.model(mx.array([[1, 1, 1, 1]]), cache=self.caches)
        mx.eval(self._written())
        self.held = copy.deepcopy([vars(c) for c in self.caches])

    def up_to(self, last: int) -> int:
        """Return the launches of a step by all layers up to `last`."""

        def run(x: mx.array) -> list[Any]:
            for layer, cache in zip(self.model.layers[: last + 1], self.caches, strict=False):
                x = layer(x, mask=None, cache=cache)
            return [x, *self._written()]

        return self.count(run, lambda: self._restored(mx.zeros((1, 1, WIDTH), mx.bfloat16)))

    def step(self) -> int:
        """Return the launches of a greedy step of mlx-lm's loop."""

        def run(newest: mx.array) -> list[Any]:
            logits = self.model(newest[None], cache=self.caches)[:, -1]
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            return [mx.argmax(logprobs, axis=-1), logprobs.squeeze(0), *self._written()]

        return self.count(run, lambda: self._restored(mx.array([1])))

    def _restored(self, x: mx.array) -> list[mx.array]:
        for cache, state in zip(self.caches, copy.deepcopy(self.held), strict=True):
            vars(cache).update(state)
        mx.eval(x, self._written())
        return [x]

    def _written(self) -> list[Any]:
        return [a for _, a in tree_flatten([list(vars(c).values()) for c in self.caches]) if isinstance(a, mx.array)]


def of_layers(steps: Sequence[StartState | MlxLm], layers: dict[str, int]) -> dict[str, Pair]:
    """Return the launches of a layer of each kind, in two kinds of steps."""
    one, more = steps
    return {kind: (one.up_to(i) - one.up_to(i - 1), more.up_to(i) - more.up_to(i - 1)) for kind, i in layers.items()}


def of_cycles(state: StartState, rows: int) -> dict[str, Pair]:
    """Return the launches of a plain step and of a cycle that verifies `rows` rows."""

    def run(*arrays: mx.array) -> list[mx.array]:
        return built(state.model, state.restored(), *arrays)

    one, more = (state.count(run, partial(_before, m)) for m in (1, rows))
    return {CYCLE: (one, more)}


def of_model(name: str, rows: int, alone: bool = False, count: Count = total) -> dict[str, dict[str, Pair]]:
    """Return launches of mlx-lm at one row, and of our loop without kernels and with all kernels.

    alone: also with each kind of KERNELS alone, without cycles. count: `total`, or `waits` for those alone.
    """
    build, layers = MODELS[name]
    model = make(build)
    theirs = MlxLm(model, count)
    found = {MLX_LM: {**of_layers([theirs, theirs], layers), CYCLE: (theirs.step(),) * 2}}
    sites = kernel_switch.place(model)
    states = [StartState(model, m, count) for m in (1, rows)]
    cycles = states[1] if rows == 4 else StartState(model, 4, count)
    kinds = {"none": (), **(KERNELS if alone else {}), "all": EVERY_OP}
    for on, ops in kinds.items():
        switch_kernels(sites, ops)
        found[on] = of_layers(states, layers) | ({} if on in KERNELS else of_cycles(cycles, rows))
    return found


def with_kernels(name: str) -> Any:
    """Return a model with all kernels on."""
    model = make(MODELS[name][0])
    switch_kernels(kernel_switch.place(model), EVERY_OP)
    return model


def switch_kernels(sites: Any, ops: Collection[str]) -> None:
    for site in sites:
        site.rows = frozenset(site.every_count if site.op in ops else ())
