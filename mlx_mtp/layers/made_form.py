"""Find what a made port consists of in mlx-lm's model: its caches, the module with the layers, and their streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches_of

from ..cache.convolution import ConvolutionCache
from ..cache.from_mlx_lm import kind_of
from ..machine.errors import first_line
from .blocks import BlockEmbedding, BlockLinear
from .lm_head import logits_of
from .noted import giving, input_of, modules_around_lists, note, noting, stream_of, unnote, with_stream

NO_BITS = "a family that has no port"
CLOSE = 0.02  # greatest `distance` of the same rows, made in passes of different sizes, in bfloat16
TINY = 1e-30
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding, BlockEmbedding)
HEADS = (nn.Linear, nn.QuantizedLinear, BlockLinear, *EMBEDDINGS)


@dataclass(eq=False)
class MadeForm:
    """What a made port consists of besides mlx-lm's model.

    kinds: of the layers' caches, by `kind_of`. empty: mlx-lm's caches, for forwards in which no layer computes.
    inner: the module that contains the layers; None if the logits are the hidden rows.
    width, dtype: of a hidden row. no_bits: why keys and values cannot be quantized. no_trees: why rows cannot form a
    tree. head_dim: a number that divides every head size of quantized keys and values. layers: those whose streams
    can be captured, () if none can, and `no_streams` is why. outputs: one of each. embedding, head: the embedding and
    LM head, if they are modules. norm: the RMSNorm that makes the rows of the last stream, or a new one where none
    does. convolutions: for each kind that is a ConvolutionCache its convolution. attentions: modules that a kernel
    can replace, with their caches' windows.
    """

    kinds: list[Any]
    empty: list[Any]
    inner: Any = None
    width: int = 0
    dtype: mx.Dtype = mx.float32
    no_bits: str | None = NO_BITS
    no_trees: str | None = None
    head_dim: int = 0
    layers: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    no_streams: str | None = None
    embedding: Any = None
    head: Any = None
    norm: Any = None
    convolutions: Sequence[Any] = ()
    attentions: Sequence[tuple[Any, int | None]] = ()


def take_form(model: Any, tokens: mx.array) -> None:
    """Set `form` of a `Made`, found by forwards of tokens [1, L].

    ValueError for layers whose caches this package does not have.
    """
    caches = mlx_lm_caches_of(model)
    model.form = MadeForm([kind_of(cache) for cache in caches], caches)
    for module in modules_around_lists(model):
        note(module)
        model.form.inner = module
        if _is_inner(model, tokens):
            break
        unnote(module)
        model.form.inner = None
    _take_convolutions(model, tokens)
    rows = model.hidden(tokens, mlx_lm_caches_of(model))
    model.form.width, model.form.dtype = rows.shape[-1], rows.dtype
    try:
        _take_streams(model, tokens, rows)
    except (ValueError, TypeError, AttributeError, LookupError) as e:
        model.form.layers, model.form.no_streams = (), first_line(e)


def _take_convolutions(model: Any, tokens: mx.array) -> None:
    """Find the layers whose only state is the last rows of a convolution's input: they need no `StateCache`."""
    caches = mlx_lm_caches_of(model)
    alone = {i: c for i, c in enumerate(caches) if type(c) is ArraysCache and len(c.cache) == 1}
    modules = [module for module in model.modules() if alone and type(module) is nn.Conv1d]
    for module in modules:
        note(module)
    if modules:
        with noting(modules) as found:
            model(tokens, cache=caches)
    for i, cache in alone.items() if modules else ():
        pairs = zip(modules, found, strict=True)
        if owner := next((module for module, calls in pairs if _ends_with(calls, tokens.shape[1], cache[0])), None):
            model.form.kinds[i], model.form.convolutions = ConvolutionCache, [*model.form.convolutions, owner]


def _ends_with(calls: list[Any], rows: int, state: Any) -> bool:
    """Return whether the only call's input has as many rows as a state, and `rows` more, and ends with the state."""
    if len(calls) != 1 or getattr(state, "ndim", 0) != 3:
        return False
    given = calls[0].given[0]
    return given.shape[1] == rows + state.shape[1] and bool(mx.array_equal(given[:, rows:], state).item())


def _is_inner(model: Any, tokens: mx.array) -> bool:
    """Return whether each row of the logits of tokens [1, L] is made of the same row of `form.inner`'s output."""
    with noting([model.form.inner]) as (calls,):
        whole = model(tokens, cache=mlx_lm_caches_of(model))
    rows = calls[0].output if len(calls) == 1 else None
    if not isinstance(rows, mx.array) or rows.ndim != 3 or rows.shape[:2] != tokens.shape:
        return False
    if mx.array_equal(rows, whole).item() or not mx.array_equal(model.logits(rows), whole).item():
        return False
    alone = mx.concatenate([model.logits(rows[:, i : i + 1]) for i in range(tokens.shape[1])], axis=1)
    if not distance(alone, whole) <= CLOSE:  # NaN is no distance
        return False
    heads = (module for module in model.modules() if type(module) in HEADS and "weight" in module)
    fitting = (module for module in heads if module.weight.shape[0] == whole.shape[-1])
    model.form.head = next((each for each in fitting if _same(partial(logits_of, each), rows, whole)), None)
    return True


def _take_streams(model: Any, tokens: mx.array, rows: mx.array) -> None:
    """Set the form's layers; ValueError unless each is called once, in order, and the last one makes the rows."""
    form, layers = model.form, getattr(model, "layers", None)
    if form.inner is None:
        raise ValueError("no module contains the layers")
    if not isinstance(layers, list) or len(layers) != len({id(layer) for layer in layers}):
        raise ValueError("its layers are no list of different modules")
    for layer in layers:
        note(layer)
    with noting(layers) as found:
        model(tokens, cache=mlx_lm_caches_of(model))
    if any(len(calls) != 1 for calls in found):
        raise ValueError("a layer is not called once")
    calls = [each for (each,) in found]
    if sorted(calls, key=lambda call: call.number) != calls:
        raise ValueError("its layers are not called in order")
    streams = [stream_of(call.output) for call in calls]
    if any(getattr(stream, "shape", None) != rows.shape for stream in streams):
        raise ValueError("its layers' outputs are not of the rows' shape")
    form.layers, form.outputs = tuple(layers), [call.output for call in calls]
    nothing = [with_stream(call.output, mx.zeros_like(rows)) for call in calls[:-1]]
    with giving(layers, [*nothing, calls[-1].output]):
        again = model.hidden(tokens, form.empty)
    if not mx.array_equal(again, rows).item():
        raise ValueError("its rows are not made of the last layer's output")
    read = input_of(calls[0])
    if not mx.array_equal(model.embedded(tokens), read).item():
        raise ValueError("its first layer reads more than the tokens")
    embeddings = (module for module in model.modules() if type(module) in EMBEDDINGS)
    norms = (module for module in model.modules() if type(module) is nn.RMSNorm and module.weight.size == form.width)
    of_rows = (each for each in norms if _same(each, streams[-1], rows))
    form.norm = next(of_rows, nn.RMSNorm(form.width))
    form.embedding = next((each for each in embeddings if _same(each, tokens, read)), None)


def _same(module: Any, x: Any, expected: mx.array) -> bool:
    """Return whether module(x) has the bits of an array; False also if x does not fit."""
    try:
        return bool(mx.array_equal(module(x), expected).item())
    except ValueError:
        return False


def distance(found: mx.array, expected: mx.array) -> float:
    """Return the greatest difference of two arrays relative to the greatest absolute value expected, or NaN."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    difference: Any = mx.abs(found - expected).max() / mx.maximum(mx.abs(expected).max(), TINY)
    return difference.item()
