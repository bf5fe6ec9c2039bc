"""Generate tokens (`generate_step`), text pieces (`stream_generate`) or a whole text (`generate`): the public API."""

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .cache.prompt_cache import PromptCache, make_prompt_cache
from .decoding.cycle import Decoder
from .decoding.loop import Yielded, decode
from .decoding.memory_needs import check_prompt, within
from .decoding.policy import compiled_for, control_for, lookup_drafts, remember
from .decoding.sampling import DRAFT_SAMPLING, LogitsProcessor, Picker, Sampler, Sampling, random_key
from .decoding.stats import Stats
from .layers.target import Target
from .machine.memory import wired


class Options(TypedDict, total=False):
    """Keyword arguments of `generate_step`."""

    max_tokens: int
    num_draft_tokens: int | None
    adaptive: bool
    draft_p_min: float
    prompt_lookup: bool | None
    compile_cycles: bool | None
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    prompt_cache: PromptCache | None
    prefill_step_size: int
    kv_bits: int | None
    mtp_kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_kv_size: int | None
    max_context: int | None
    check_memory: bool
    temp: float
    top_p: float
    top_k: int
    min_p: float
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int]
    seed: int | None
    draft_sampling: str
    logprobs: bool
    stop_tokens: Collection[int]
    prompt_progress_callback: Callable[[int, int], None] | None
    stats: Stats | None


@dataclass
class GenerationResponse(MLXResponse):
    """mlx-lm's response and, as `stats`, the counters of the generation so far."""

    stats: Stats | None = None


def generate_step(
    prompt: mx.array | Sequence[int],
    model: Target,
    *,
    max_tokens: int = 256,
    num_draft_tokens: int | None = None,
    adaptive: bool = True,
    draft_p_min: float = 0.0,
    prompt_lookup: bool | None = None,
    compile_cycles: bool | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: PromptCache | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    mtp_kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    max_kv_size: int | None = None,
    max_context: int | None = None,
    check_memory: bool = True,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] = (),
    seed: int | None = None,
    draft_sampling: str = "coupled",
    logprobs: bool = False,
    stop_tokens: Collection[int] = (),
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stats: Stats | None = None,
) -> Generator[Yielded, None, None]:
    """Yield (token, logprobs [V] or None, from_draft) for a prompt of token ids [T].

    num_draft_tokens: most tokens that the heads draft per cycle; 0 is plain decoding, None one per head, or two with
        a head that is recycled. It changes the speed, never the text; nor do the next four.
    adaptive: draft as many as pays by measured costs and acceptance, perhaps none; False: always num_draft_tokens.
    draft_p_min: where it pays (without `adaptive`: always), drafts from the first on whose probability, to the head,
        is less are not verified, at the price of one more wait in such a cycle. 0: never.
    prompt_lookup: draft up to seven tokens that followed the last ones before. None: where it pays, with `adaptive`.
    compile_cycles: record cycles that come again, and replay them. None: on a GPU, unless a trial finds that slower.
    max_tokens: -1 means no limit but `max_context`, 0 only reads the prompt into `prompt_cache`.
    sampler, logits_processors: mlx-lm's callables; a sampler stands in for temp .. xtc_threshold.
    prompt_cache: from `make_prompt_cache`; continued where it stands and left holding every token but the last
        one yielded, wherever the generator is stopped.
    max_context: most tokens, those held and max_tokens included. check_memory: that there is room for over 4,096.
    seed: makes draws reproducible, for every num_draft_tokens alike (not with an own `sampler` that draws).
    draft_sampling: at a temperature drafts are the heads' likeliest tokens ("greedy"), or draws with the noise of the
        target's own ("coupled").
    stop_tokens: yielded, then the generation ends. stats: filled while generating.
    Raises ValueError (at the call) for an argument out of range.
    """
    xtc = (xtc_probability, xtc_threshold, tuple(xtc_special_tokens))
    sampling = Sampling(temp, top_p, top_k, min_p, min_tokens_to_keep, *xtc)
    sampling.validate(model.vocab_size)
    _check_sampling(sampling, sampler, draft_sampling)
    _check_numbers(max_tokens, prefill_step_size, seed, draft_p_min)
    tokens = _token_ids(prompt, model.vocab_size)
    k = _draft_count(num_draft_tokens, model, prompt_cache)
    layout = {"kv_bits": kv_bits, "mtp_kv_bits": mtp_kv_bits, "max_kv_size": max_kv_size}
    cache = _cache_for(model, prompt_cache, k, kv_group_size, quantized_kv_start, layout)
    max_tokens = within(max_context, cache.offset, len(tokens), max_tokens)
    check_prompt(model, cache, len(tokens), max_tokens, prefill_step_size, ignore=not check_memory)
    cache.reserve(cache.offset + len(tokens) + min(max_tokens % 2**31, RESERVED_TOKENS))
    if seed is not None and sampler is not None:
        mx.random.seed(seed)
    stats = stats or Stats()
    stats.num_draft_tokens, stats.prompt_tokens, stats.max_tokens = k, len(tokens), max_tokens
    lookup = lookup_drafts(cache, k, plain=num_draft_tokens == 0, adaptive=adaptive, asked=prompt_lookup)
    picker = Picker(sampling, sampler, tuple(logits_processors or ()), logprobs, random_key(seed), draft_sampling)
    compiled = compiled_for(model, cache, picker, compile_cycles)
    control = control_for(model, k, lookup, adaptive=adaptive, p_min=draft_p_min > 0, compiled=compiled)
    decoder = Decoder(model, cache, picker, control, stats, prefill_step_size, k, lookup, draft_p_min, compiled)
    steps = decode(decoder, tokens, max_tokens, frozenset(stop_tokens), prompt_progress_callback)
    return _closed_by(steps, partial(remember, model, control, compiled, stats))


def _closed_by(
    steps: Generator[Yielded, None, None], remember_costs: Callable[[], None]
) -> Generator[Yielded, None, None]:
    """Yield the steps, then keep what they cost for the next generation."""
    try:
        yield from steps
    finally:
        remember_costs()


DEFAULT_DRAFTS = 2  # of a recycled head, which is right less and less often
RESERVED_TOKENS = 4096  # most new tokens that a cache takes room for at once; more is added as it is needed


def _check_numbers(max_tokens: int, prefill_step_size: int, seed: int | None, draft_p_min: float) -> None:
    for name, value, least in (("max_tokens", max_tokens, -1), ("prefill_step_size", prefill_step_size, 1)):
        if value < least:
            raise ValueError(f"{name}={value}: allowed is {least} or more")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: allowed is 0 to 2**63 - 1")
    if not 0 <= draft_p_min <= 1:
        raise ValueError(f"draft_p_min={draft_p_min}: allowed is between 0 and 1")


def _check_sampling(sampling: Sampling, sampler: Sampler | None, mode: str) -> None:
    if sampler is not None and sampling != Sampling():
        raise ValueError("sampler: give either a sampler or temp, top_p, top_k, min_p, xtc_*, not both")
    if mode not in DRAFT_SAMPLING:
        raise ValueError(f"draft_sampling={mode!r}: allowed are {', '.join(DRAFT_SAMPLING)}")


def default_draft_tokens(model: Target) -> int:
    """Return the drafts per cycle where nothing is said: one per head, or DEFAULT_DRAFTS with a recycled one."""
    return min(model.max_draft_tokens, max(DEFAULT_DRAFTS, len(model.mtp)))


def _token_ids(prompt: mx.array | Sequence[int], vocab_size: int) -> list[int]:
    tokens = np.array(prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"prompt: shape {tokens.shape}; expected at least one token id, in one dimension")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"prompt: {tokens.tolist()[0]!r} is not a token id (an integer)")
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt: {token} is not a token id between 0 and {vocab_size - 1}")
    return tokens.tolist()


def _cache_for(
    model: Target, given: PromptCache | None, k: int, group_size: int, start: int, layout: dict[str, int | None]
) -> PromptCache:
    """Make a cache with the layout asked for, or take the caller's own, whose layout is what it is."""
    if given is None:
        return make_prompt_cache(
            model, num_draft_tokens=k, kv_group_size=group_size, quantized_kv_start=start, **layout
        )
    if asked := [f"{name}={value}" for name, value in layout.items() if value is not None]:
        raise ValueError(f"{asked[0]}: fixed when a prompt_cache is made; give it to make_prompt_cache")
    if len(given.layers) != len(model.windows()) or len(given.heads) > len(model.mtp):
        raise ValueError("prompt_cache: made for another model (its layers or heads do not match)")
    return given


def _draft_count(requested: int | None, model: Target, cache: PromptCache | None) -> int:
    """Choose the drafts per cycle: at most one per head that the model and the cache have, or as many as a
    recycled head may make."""
    if cache is not None and not isinstance(cache, PromptCache):
        raise ValueError(f"prompt_cache: a {type(cache).__name__}; expected one from mlx_mtp.make_prompt_cache")
    most, where = model.max_draft_tokens, "the model"
    if cache is not None and len(cache.heads) < len(model.mtp):
        most, where = len(cache.heads), "prompt_cache"
    if requested is None:
        return min(most, default_draft_tokens(model))
    if type(requested) is not int or not 0 <= requested <= most:
        raise ValueError(f"num_draft_tokens={requested}: allowed is 0 to {most} with the MTP heads of {where}")
    return requested


def stream_generate(
    model: Target, tokenizer: Any, prompt: str | mx.array | Sequence[int], **options: Unpack[Options]
) -> Iterator[GenerationResponse]:
    """Yield GenerationResponses (text segment, token, speeds, stats) for a prompt of text or token ids.

    Options are those of `generate_step`; the tokenizer's end-of-text tokens always stop. Raises ValueError (at
    the call) for an argument out of range.
    """
    if options.get("max_tokens", 256) == 0:
        raise ValueError("max_tokens=0: allowed is 1 or more, or -1 for no limit")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        ids = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    else:
        ids = prompt
    stats = options.setdefault("stats", None) or Stats()
    stops = {*options.get("stop_tokens", ()), *tokenizer.eos_token_ids}
    steps = generate_step(ids, model, **{**options, "stats": stats, "stop_tokens": stops})
    return _responses(tokenizer.detokenizer, steps, stats, stops)


def _responses(
    detokenizer: Any, steps: Generator[Yielded, None, None], stats: Stats, stops: Collection[int]
) -> Iterator[GenerationResponse]:
    """Detokenize; as in mlx-lm a stop token has no text, and the last response has the reason."""
    with wired(), contextlib.closing(steps):
        for step in steps:
            reason = "length" if stats.generation_tokens == stats.max_tokens else None
            if step[0] in stops:
                reason = "stop"
            else:
                detokenizer.add_token(step[0])
            if reason:
                detokenizer.finalize()
            yield _response(detokenizer, step, stats, reason)


def _response(detokenizer: Any, step: Yielded, stats: Stats, reason: str | None) -> GenerationResponse:
    token, logprobs, from_draft = step
    return GenerationResponse(
        text=detokenizer.last_segment,
        token=token,
        logprobs=logprobs,  # type: ignore[arg-type] - None unless asked for
        from_draft=from_draft,
        prompt_tokens=stats.prompt_tokens,
        prompt_tps=stats.prompt_tps,
        generation_tokens=stats.generation_tokens,
        generation_tps=stats.generation_tps,
        peak_memory=stats.peak_memory / 1e9,
        finish_reason=reason,
        stats=stats,
    )


def generate(
    model: Target, tokenizer: Any, prompt: str | mx.array | Sequence[int], **options: Unpack[Options]
) -> str:
    """Return the whole text of `stream_generate`."""
    return "".join(response.text for response in stream_generate(model, tokenizer, prompt, **options))
