"""Explain the options of a generation, check them, and choose those that are not given."""

from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from ..cache.from_mlx_lm import from_mlx_lm
from ..cache.prompt_cache import PromptCache, make_prompt_cache
from ..layers.target import Target
from .prefill_chunk import CHUNKS, ON_CPU
from .sampling import DRAFT_SAMPLING, Sampler, Sampling

F = TypeVar("F", bound=Callable)
EXPLANATION = """Options, by keyword, with those defaults that are not None, off or all:

max_tokens: most new tokens (256); -1 means no limit but `max_context`.
temp, top_p, top_k, min_p, min_tokens_to_keep, xtc_probability, xtc_threshold, xtc_special_tokens: sampling, with
    mlx_lm's meanings and order; at temp 0, the default, the likeliest token is taken.
seed: makes draws reproducible, in any thread and for every num_draft_tokens alike. `mx.random.seed` does so too,
    but only for what the thread that calls it begins.
sampler: mlx_lm's callable, logprobs [1, V] -> token [1], in place of temp .. xtc_special_tokens. What it draws
    from MLX's random state is reproducible as other draws are; other state it must not have.
logits_processors: mlx_lm's callables, (tokens [T], logits [1, V]) -> logits [1, V], applied in order.
logprobs: yield each token's logprobs [V] with it.
stop_tokens: token ids that end the generation, and are yielded; the tokenizer's own always do for text.
num_draft_tokens: most tokens that the heads draft per cycle; 0 is plain decoding, None one per head, or two
    with a head that is recycled. It changes the speed, never the text; nor do the next five.
adaptive: draft as many as pays by measured costs and acceptance, perhaps none (the default); False: always
    num_draft_tokens.
draft_p_min: where it pays (without `adaptive`: always), drafts from the first on whose probability, to the head,
    is less are not verified, at the price of one more wait in such a cycle. 0: never.
prompt_lookup: draft up to 15 tokens that followed the last ones before. None: where it pays, with `adaptive`.
compile_cycles: record cycles that come again, and replay them. None: on a GPU, unless a trial finds that slower.
draft_sampling: at a temperature drafts are the heads' likeliest tokens ("greedy"), or draws with the noise of the
    target's own ("coupled", the default).
prompt_cache: from `make_prompt_cache`; continued where it stands and left holding every token but the last one
    yielded, wherever the generator is stopped. An empty list of mlx_lm's caches comes to hold one of these.
prefill_step_size: prompt tokens that are read at a time. None: what the load chose, 2048, 1024, 512 or 256; on a CPU
    256.
kv_bits, mtp_kv_bits: bits of the target's and the heads' keys and values: 2, 3, 4, 5, 6, 8, or None.
kv_group_size: values that are quantized together: 32, 64, 128, or None for 64, 32 where the head size needs it.
quantized_kv_start: with kv_bits, positions before this one are kept unquantized (5000).
max_kv_size: positions that full attention keeps, the first four and the last ones.
max_context: most tokens, those held and max_tokens included.
check_memory: refuse what needs more memory than there is, where it is over 4,096 tokens (True).
prompt_progress_callback: called with (prompt tokens read, all of them) before each chunk and at the end.
stats: a `Stats` that is filled while generating.
"""
DEFAULT_DRAFTS = 2  # of a recycled head, which is right less and less often
QUANTIZED_KV_START = 5000  # mlx_lm's
CACHE_OPTIONS = ("kv_bits", "mtp_kv_bits", "kv_group_size", "quantized_kv_start", "max_kv_size")
# Arguments of mlx_lm's that have no meaning here, and what does as they do.
ELSEWHERE = {
    "draft_model": "give a drafter's directory to mlx_mtp.load",
    "stream": "leave it out, all work goes to one stream that any thread may use",
    "input_embeddings": "leave it out, a prompt is text or token ids",
    "formatter": "leave it out, a text comes as it is",
}


def explained(function: F) -> F:
    """Add what the options mean to a function's docstring."""
    function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{EXPLANATION}"
    return function


def check_names(options: Any) -> None:
    """Raise ValueError for an argument of mlx_lm's that is another one here."""
    for name in ELSEWHERE.keys() & options.keys():
        if options.pop(name) is not None:
            raise ValueError(f"{name}: not taken here; {ELSEWHERE[name]}")


def check_model(model: Any) -> None:
    """Raise ValueError for a model that mlx_lm has loaded."""
    if not hasattr(model, "no_hidden"):
        raise ValueError("model: mlx_lm loaded it, and left out its MTP heads; load it with mlx_mtp.load(path)")


def check_numbers(max_tokens: int, step: int, seed: int | None, draft_p_min: float) -> None:
    """Raise ValueError for a number out of range."""
    for name, value, least in (("max_tokens", max_tokens, -1), ("prefill_step_size", step, 1)):
        if value < least:
            raise ValueError(f"{name}={value}: allowed is {least} or more")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: allowed is 0 to 2**63 - 1")
    if not 0 <= draft_p_min <= 1:
        raise ValueError(f"draft_p_min={draft_p_min}: allowed is between 0 and 1")


def check_sampling(sampling: Sampling, sampler: Sampler | None, mode: str) -> None:
    """Raise ValueError for two ways to sample, or an unknown one to draft."""
    if sampler is not None and sampling != Sampling():
        raise ValueError("sampler: give either a sampler or temp, top_p, top_k, min_p, xtc_*, not both")
    if mode not in DRAFT_SAMPLING:
        raise ValueError(f"draft_sampling={mode!r}: allowed are {', '.join(DRAFT_SAMPLING)}")


def default_step(model: Any) -> int:
    """Return the tokens per prefill chunk that the load chose (`prefill_chunk`); without that the smallest."""
    if mx.default_device() == mx.cpu:
        return ON_CPU
    return (model.report and model.report.prefill_chunk) or CHUNKS[-1]


def largest_step() -> int:
    """Return the most tokens per prefill chunk that a load on this device may choose."""
    return ON_CPU if mx.default_device() == mx.cpu else CHUNKS[0]


def default_draft_tokens(model: Target) -> int:
    """Return the drafts per cycle where nothing is said: one per head, or DEFAULT_DRAFTS with a recycled one."""
    return min(model.max_draft_tokens, max(DEFAULT_DRAFTS, len(model.mtp)))


def draft_count(requested: int | None, model: Target, cache: PromptCache | None) -> int:
    """Choose the drafts per cycle: at most one per head that the model and the cache have, or as many as a
    recycled head may make."""
    if cache is not None and not isinstance(cache, PromptCache):
        raise ValueError(f"prompt_cache: a {type(cache).__name__}; expected one from mlx_mtp.make_prompt_cache")
    most, where = model.max_draft_tokens, "the model"
    if cache is not None and len(cache.heads) < len(model.head_windows()):
        most, where = len(cache.heads), "prompt_cache"
    if requested is None:
        return min(most, default_draft_tokens(model))
    if type(requested) is not int or not 0 <= requested <= most:
        raise ValueError(f"num_draft_tokens={requested}: allowed is 0 to {most} with the MTP heads of {where}")
    return requested


def token_ids(prompt: mx.array | Sequence[int], vocab_size: int) -> list[int]:
    """Return a prompt's token ids; ValueError where they are none."""
    tokens = np.array(prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"prompt: shape {tokens.shape}; expected at least one token id, in one dimension")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"prompt: {tokens.tolist()[0]!r} is not a token id (an integer)")
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt: {token} is not a token id between 0 and {vocab_size - 1}")
    return tokens.tolist()


def cache_options(options: Any) -> dict[str, Any]:
    """Take out of options the arguments of `make_prompt_cache`."""
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
    """Make a cache with the layout asked for, or take the caller's own, whose layout is what it is."""
    if given is None:
        options = {"kv_group_size": group_size, "quantized_kv_start": start, **layout}
        return make_prompt_cache(model, num_draft_tokens=k, **options)
    if asked := [f"{name}={value}" for name, value in layout.items() if value is not None]:
        raise ValueError(f"{asked[0]}: fixed when a prompt_cache is made; give it to make_prompt_cache")
    if len(given.layers) != len(model.windows()) or len(given.heads) > len(model.head_windows()):
        raise ValueError("prompt_cache: made for another model (its layers or heads do not match)")
    return given


def check_step(model: Target, sampling: Sampling, sampler: Sampler | None, mode: str, step: int | None) -> int:
    """Return the tokens per prefill chunk; ValueError for a model of mlx_lm's, or sampling that is not possible."""
    check_model(model)
    sampling.validate(model.vocab_size)
    check_sampling(sampling, sampler, mode)
    return default_step(model) if step is None else step


def opened(
    model: Target, prompt: Any, num_draft_tokens: int | None, prompt_cache: Any, *layout: Any
) -> tuple[list[int], int, PromptCache]:
    """Return the prompt's token ids, the most drafts per cycle, and the cache, a new one where none is given.

    layout: of a new cache, as `cache_for` takes it.
    """
    tokens, given = token_ids(prompt, model.vocab_size), from_mlx_lm(model, prompt_cache)
    k = draft_count(num_draft_tokens, model, given)
    return tokens, k, cache_for(model, given, k, *layout)
