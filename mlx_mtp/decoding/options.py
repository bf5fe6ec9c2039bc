"""Explain and check the options of a generation, and choose their defaults."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from inspect import cleandoc
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..cache.from_mlx_lm import from_mlx_lm
from ..cache.make_cache import make_prompt_cache
from ..cache.prompt_cache import PromptCache
from ..grammar import Constraint, Grammar, compiled
from ..layers.target import Target
from ..layers.with_heads import default_draft_tokens
from ..machine.ranges import Tokens, check, check_options
from .picture_rows import check_pictures
from .prefill_chunk import CHUNKS, ON_CPU
from .ranges import OPTIONS
from .sampling import DRAFT_SAMPLING, Sampler, Sampling

F = TypeVar("F", bound=Callable)
EXPLANATION = """Options, by keyword, with those defaults that are not None, off or all:

max_tokens: maximum number of new tokens (256); -1 means no limit but `max_context`.
temp, top_p, top_k, min_p, min_tokens_to_keep, xtc_probability, xtc_threshold, xtc_special_tokens: sampling, with
    mlx_lm's meanings and order; at temp 0, the default, the likeliest token is taken.
seed: makes draws reproducible, in any thread and with any num_draft_tokens. `mx.random.seed` does so too, but only
    for generations that start in the thread that calls it.
grammar: from `mlx_mtp.grammar`: every token is chosen among those that it allows after the tokens before. The
    tokenizer's end-of-text tokens then end the generation.
sampler: mlx_lm's callable, logprobs [1, V] -> token [1], instead of temp .. xtc_special_tokens. Its draws from
    MLX's random state are reproducible as other draws are; it must have no other state.
logits_processors: mlx_lm's callables, (tokens [T], logits [1, V]) -> logits [1, V], applied one after another.
logprobs: yield each token's logprobs [V] with it.
pictures: the `Picture`s of `model.vision.picture` whose `tokens` are in the prompt, in any order; those that the
    prompt cache has read may be left out.
stop_tokens: token ids that end the generation, and are yielded; for text, the tokenizer's own are added.
num_draft_tokens: maximum number of tokens that the heads or drafter draft per cycle; 0 is plain decoding, None one
    per head, two with a recycled head or a small model, up to 15 with a block drafter. This and the next seven
    options change the speed, never the text.
adaptive: choose the number of drafts, also none, by measured costs and acceptance (the default); False: always
    num_draft_tokens.
draft_p_min: do not verify the first draft with a smaller probability, by the head, nor the drafts after it. Such a
    cycle waits once more. With `adaptive` only where that is faster. 0: verify all drafts.
prompt_lookup: draft up to 15 tokens that followed an earlier copy of the last ones. None: where that is faster,
    with `adaptive`.
tree: maximum rows of a pass whose drafts are a tree, the newest token's included: 2 to 16; 0: chains only. A tree
    may have more drafts than num_draft_tokens. None: 16 with `adaptive`, where that is faster, else 0; if given
    without `adaptive`, all drafts of the drafter are such trees. Without effect with logits_processors, and
    with a drafter or model that excludes trees.
grammar_drafts: maximum number of tokens that the grammar forces, that repeat earlier choices of the answer, or that
    keep the style of its separators, which are drafted per cycle. None: 15, but 0 with num_draft_tokens=0.
compile_cycles: record cycles of equal shapes and replay them. None: on a GPU, unless a trial finds that slower.
draft_sampling: at a temperature, drafts are the heads' likeliest tokens ("greedy"), or draws with the noise of the
    target's draws ("coupled", the default).
prompt_cache: from `make_prompt_cache`; the prompt is appended to it. At the end, also after an early stop, it
    contains every token but the last one yielded. In a list, mlx_lm's empty caches are replaced by a new one.
prefill_step_size: tokens per prefill chunk. None: chosen by the load, 2048, 1024, 512 or 256; on a CPU 256.
kv_bits, mtp_kv_bits: bits of the target's and the heads' keys and values: 2, 3, 4, 5, 6, 8, or None.
kv_group_size: values that are quantized together: 32, 64, 128, or None for 64, 32 where the head size needs it.
quantized_kv_start: with kv_bits, positions before this one are kept unquantized (5000).
max_kv_size: number of positions that full attention keeps: the first four and the last ones.
max_context: maximum number of tokens, including those in the cache and max_tokens.
check_memory: refuse more than 4,096 tokens if the available memory is too small (True).
prompt_progress_callback: called with (prompt tokens read, prompt tokens) before each chunk and at the end.
stats: a `Stats` that is filled while generating.
"""
QUANTIZED_KV_START = 5000  # mlx_lm's
CACHE_OPTIONS = ("kv_bits", "mtp_kv_bits", "kv_group_size", "quantized_kv_start", "max_kv_size")
# Arguments of mlx_lm's that are not supported, and what to do instead.
ELSEWHERE = {
    "draft_model": "give a drafter's directory to mlx_mtp.load",
    "stream": "leave it out, all work goes to one stream that any thread may use",
    "input_embeddings": "leave it out, a prompt is text or token ids",
    "formatter": "leave it out, text is yielded unchanged",
}


def explained(function: F) -> F:
    """Append EXPLANATION to a function's docstring; return the function."""
    function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{EXPLANATION}"
    return function


def check_names(options: Any) -> None:
    """Remove mlx_lm's arguments that are not supported from `options`, a dict.

    Raises ValueError if one is not None, and as `check_values`.
    """
    check_values(options)
    for name in ELSEWHERE.keys() & options.keys():
        if options.pop(name) is not None:
            raise ValueError(f"{name}: not taken here; {ELSEWHERE[name]}")


def check_values(options: dict[str, Any]) -> None:
    """Raise ValueError for the first option that OPTIONS does not allow; other options are not checked."""
    check_options(options, OPTIONS)


def check_call(model: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for a model that mlx_mtp did not load, and as `check_values`."""
    if not hasattr(model, "no_hidden"):
        raise ValueError("model: mlx_mtp did not load it (mlx_lm leaves out MTP heads); use mlx_mtp.load(path)")
    check_values(options)


def check_sampling(sampling: Sampling, sampler: Sampler | None, mode: str) -> None:
    """Raise ValueError for a sampler together with non-default sampling options, or an unknown `draft_sampling`."""
    if sampler is not None and sampling != Sampling():
        names = ", ".join(field.name for field in fields(Sampling))
        raise ValueError(f"sampler: give either a sampler or options of sampling, not both; these are {names}")
    if mode not in DRAFT_SAMPLING:
        raise ValueError(f"draft_sampling={mode!r}: allowed are {', '.join(DRAFT_SAMPLING)}")


def default_chunk(model: Any) -> int:
    """Return the tokens per prefill chunk: ON_CPU on a CPU, else the load's choice or, without one, CHUNKS[-1]."""
    if mx.default_device() == mx.cpu:
        return ON_CPU
    return (model.report and model.report.prefill_chunk) or CHUNKS[-1]


def max_chunk() -> int:
    """Return the maximum tokens per prefill chunk that a load on this device chooses."""
    return ON_CPU if mx.default_device() == mx.cpu else CHUNKS[0]


def draft_count(requested: int | None, model: Target, cache: PromptCache | None) -> int:
    """Return the maximum drafts per cycle for the option `num_draft_tokens`; None gives the default.

    The default is at most what the drafter, and a cache with fewer heads than the model, support. Raises ValueError
    for more than that, for anything but an integer of at least 0, and for a cache that is no PromptCache.
    """
    if cache is not None and not isinstance(cache, PromptCache):
        raise ValueError(f"prompt_cache: a {type(cache).__name__}; expected one from mlx_mtp.make_prompt_cache")
    most, where = model.max_draft_tokens, "the model"
    if cache is not None and len(cache.heads) < len(model.head_windows()):
        most, where = len(cache.heads), "prompt_cache"
    if requested is None:
        return min(most, default_draft_tokens(model))
    if type(requested) is not int or not 0 <= requested <= most:
        if not most:
            raise ValueError(f"num_draft_tokens={requested}: allowed is 0, because {where} has no drafter")
        raise ValueError(f"num_draft_tokens={requested}: allowed is 0 to {most} with the drafter of {where}")
    return requested


def token_ids(prompt: mx.array | Sequence[int], vocab_size: int, *, pictures: bool = False) -> list[int]:
    """Return a prompt's token ids; ValueError unless it is a non-empty list of integers from 0 to vocab_size - 1.

    pictures: whether negative integers, which are rows of pictures, are allowed too; `check_pictures` checks these.
    """
    tokens = np.array(prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"prompt: shape {tokens.shape}; expected at least one token id, in one dimension")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"prompt: an array of {tokens.dtype}; expected token ids, which are integers")
    for token in (tokens.min(), tokens.max()):
        if not (0 <= token < vocab_size or (pictures and token < 0)):
            raise ValueError(f"prompt: {token} is not a token id between 0 and {vocab_size - 1}")
    return tokens.tolist()


def cache_options(options: Any) -> dict[str, Any]:
    """Remove those of CACHE_OPTIONS that are in `options`, a dict, and return them in another dict.

    quantized_kv_start is always returned, by default QUANTIZED_KV_START.
    """
    given = {name: options.pop(name) for name in CACHE_OPTIONS if name in options}
    return {"quantized_kv_start": QUANTIZED_KV_START, **given}


def cache_for(
    model: Target,
    given: PromptCache | None,
    k: int,
    group_size: int | None,
    start: int,
    layout: dict[str, int | None],
) -> PromptCache:
    """Return the caller's cache, or for None a new one by `make_prompt_cache` with k as its num_draft_tokens.

    The cache's `adapter` becomes the digest of the selected adapter. With a cache, k, group_size and start are
    ignored. Raises ValueError for a cache together with an option of `layout` that is not None, for a cache with
    another number of layers or more heads than the model, or of tokens read with another adapter, and for what
    `make_prompt_cache` refuses.
    """
    adapters = model.runtime.adapters
    if given is None:
        options = {"kv_group_size": group_size, "quantized_kv_start": start, **layout}
        cache = make_prompt_cache(model, num_draft_tokens=k, **options)
        cache.adapter = adapters.fingerprint
        return cache
    if asked := [f"{name}={value}" for name, value in layout.items() if value is not None]:
        raise ValueError(f"{asked[0]}: fixed when a prompt_cache is made; give it to make_prompt_cache")
    if len(given.layers) != len(model.windows()) or len(given.heads) > len(model.head_windows()):
        raise ValueError("prompt_cache: made for another model (its layers or heads do not match); make a new one")
    if given.offset and given.adapter not in (None, adapters.fingerprint):
        before = adapters.name_of(given.adapter)
        raise ValueError(
            f"prompt_cache: its tokens were read with adapter {before!r}, and {adapters.selected!r} is selected; "
            f"select {before!r}, or use a new cache"
        )
    given.adapter = adapters.fingerprint
    return given


def checked_chunk(model: Target, sampling: Sampling, sampler: Sampler | None, mode: str, chunk: int | None) -> int:
    """Return the tokens per prefill chunk, `chunk` or the model's default, after checking sampling options.

    Raises ValueError for invalid sampling options; `chunk` is not checked.
    """
    sampling.validate(model.vocab_size)
    check_sampling(sampling, sampler, mode)
    return default_chunk(model) if chunk is None else chunk


def ends(
    grammar: Grammar | Constraint | None, stop_tokens: Collection[int], vocab_size: int
) -> tuple[Constraint | None, list[list[int]]]:
    """Return the compiled grammar, or None, and the stop sequences of a generation, of one token each.

    These are `stop_tokens` and, with a grammar, its end-of-text tokens. Raises ValueError as `compiled`, and for
    stop_tokens that are no token ids.
    """
    check("stop_tokens", stop_tokens, Tokens())
    constraint = compiled(grammar, None, vocab_size) if grammar else None
    return constraint, [[token] for token in sorted({*stop_tokens, *(constraint.eos if constraint else ())})]


def checked_inputs(
    model: Target,
    prompt: Any,
    pictures: Any,
    whole: bool,
    num_draft_tokens: int | None,
    prompt_cache: Any,
    *layout: Any,
) -> tuple[list[int], int, PromptCache]:
    """Return the prompt's token ids, the maximum drafts per cycle, and the cache to use.

    The cache is the given one, or a new one. A list of mlx-lm's empty caches is changed (`from_mlx_lm`). layout: the
    arguments group_size, start and layout of `cache_for`. pictures, whole: as in `check_pictures`. Raises ValueError
    for an argument that is invalid.
    """
    tokens = token_ids(prompt, model.vocab_size, pictures=model.vision is not None)
    given = from_mlx_lm(model, prompt_cache)
    k = draft_count(num_draft_tokens, model, given)
    cache = cache_for(model, given, k, *layout)
    check_pictures(model, cache, tokens, pictures, whole=whole)
    return tokens, k, cache
