"""Generate tokens (`generate_step`), text pieces (`stream_generate`), a text (`generate`) or a batch of texts.

Any thread may call these functions, and any thread may advance, close or drop a generator. Concurrent generations
take turns on the machine, one cycle (or load, or prompt) at a time, in the order of their requests; a generator that
is not advanced does not block others.
"""

import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .batch.arguments import for_each
from .batch.generator import BatchGenerator
from .batch.responses import Response
from .cache.make_cache import make_prompt_cache
from .cache.prompt_cache import PromptCache
from .decoding import options as checked
from .decoding.agreement import agreed
from .decoding.driver import Driver
from .decoding.images import images_of, with_images
from .decoding.loop import decode
from .decoding.memory_needs import make_room
from .decoding.sampling import LogitsProcessor, Picker, Sampler, Sampling, random_key
from .decoding.seating import DriverOptions
from .decoding.sequence import Asked, Yielded, new_sequence
from .decoding.stats import Stats
from .grammar import Constraint, Grammar, compiled
from .layers.adapters import adapters_now
from .layers.target import Target
from .machine.stream import in_turn, in_turns
from .pictures.rows import Picture
from .ranks.watch import wait_for_reason
from .tuning.kernel_switch import switch_on_for_drafts

Prompt = str | mx.array | Sequence[int]
Generated = Generator[Yielded, None, None]
RULE = "=" * 10


@dataclass
class GenerationResponse(MLXResponse):
    """mlx-lm's response to one token. stats: the generation's counters, which later tokens change."""

    stats: Stats | None = None


@checked.explained
@in_turn()
def generate_step(
    prompt: mx.array | Sequence[int],
    model: Target,
    *,
    max_tokens: int = 256,
    num_draft_tokens: int | None = None,
    adaptive: bool = True,
    tree: int | None = None,
    draft_p_min: float = 0.0,
    prompt_lookup: bool | None = None,
    compile_cycles: bool | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: PromptCache | list[Any] | None = None,
    prefill_step_size: int | None = None,
    kv_bits: int | None = None,
    mtp_kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int = checked.QUANTIZED_KV_START,
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
    grammar: Grammar | Constraint | None = None,
    grammar_drafts: int | None = None,
    draft_sampling: str = "coupled",
    logprobs: bool = False,
    stop_tokens: Collection[int] = (),
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stats: Stats | None = None,
    pictures: Sequence[Picture] = (),
) -> Generated:
    """Yield (token, logprobs [V] or None, whether drafted), with a final stop token; max_tokens=0 only prefills.

    prompt: token ids [T]. ValueError at the call for an invalid option, or a prompt of no, or too many, tokens.
    """
    checked.check_call(model, locals())
    xtc, stats = (xtc_probability, xtc_threshold, tuple(xtc_special_tokens)), stats or Stats()
    sampling = Sampling(temp, top_p, top_k, min_p, min_tokens_to_keep, *xtc)
    chunk = checked.checked_chunk(model, sampling, sampler, draft_sampling, prefill_step_size)
    layout = {"kv_bits": kv_bits, "mtp_kv_bits": mtp_kv_bits, "max_kv_size": max_kv_size}
    given = pictures, max_tokens != 0, num_draft_tokens, prompt_cache, kv_group_size, quantized_kv_start, layout
    tokens, k, cache = checked.checked_inputs(model, prompt, *given)
    max_tokens = make_room(model, cache, len(tokens), max_tokens, chunk, max_context, check=check_memory)
    asked = Asked(num_draft_tokens == 0, adaptive, prompt_lookup, grammar_drafts, tree)
    limits, stops = checked.ends(grammar, stop_tokens, model.vocab_size)
    same = (k, asked, max_tokens, cache.offset, chunk, sampling, draft_sampling, draft_p_min, stops)
    tokens, key = agreed(model.ranks, tokens, random_key(seed), (*same, limits and limits.text))
    picker = Picker(sampling, sampler, tuple(logits_processors or ()), logprobs, key, draft_sampling)
    sequence = new_sequence(cache, len(tokens), picker, stops, max_tokens, k, stats, asked=asked, grammar=limits)
    driver = Driver(model, DriverOptions(chunk, adaptive, draft_p_min, compile_cycles))
    return in_turns(_decoded(driver, sequence, tokens, prompt_progress_callback), adapters_now(model))


def _decoded(driver: Driver, sequence: Any, *how: Any) -> Generated:
    """Yield the tokens of `decode`, with the kernels that the sequence's drafts need.

    After an error that may be another rank's, wait for the reason of its end.
    """
    switch_on_for_drafts(driver.model, sequence.most_drafts)
    try:
        yield from decode(driver, sequence, *how)
    except RuntimeError as e:
        wait_for_reason(e)
        raise


@checked.explained
def stream_generate(
    model: Target, tokenizer: Any, prompt: Prompt, max_tokens: int = 256, **options: Any
) -> Iterator[GenerationResponse]:
    """Yield GenerationResponses (text segment, token, speeds, stats) for a prompt of text or token ids.

    The tokenizer's end-of-text tokens also end a text. The last response has finish_reason "stop" or "length". Raises
    ValueError as `generate_step` does, and for images that cannot be opened or read, at the call. More options:
    images: paths, bytes of files, `data:` URLs or images of Pillow, one for each mark of a picture in the prompt; if
        it has no mark, the pictures come before its text. image: the same, as in mlx_vlm; both take one or a list.
    resize_shape: (width, height) in pixels; each image is scaled to fit, with its ratio kept.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens=0: allowed is 1 or more, or -1 for no limit")
    checked.check_names(options)
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    images, shape = images_of(options), options.pop("resize_shape", None)
    ids, found = with_images(model, tokenizer, encoded(tokenizer, prompt), images, shape)
    options["pictures"] = found or options.get("pictures", ())
    stats = options.setdefault("stats", None) or Stats()
    stops = {*options.get("stop_tokens", ()), *tokenizer.eos_token_ids}
    if options.get("grammar") is not None:
        options["grammar"] = constraint = compiled(options["grammar"], tokenizer, model.vocab_size)
        stops |= set(constraint.eos)
    options |= {"max_tokens": max_tokens, "stats": stats, "stop_tokens": stops}
    return in_turns(_responses(tokenizer.detokenizer, generate_step(ids, model, **options), stats, stops))


def encoded(tokenizer: Any, prompt: Prompt) -> Any:
    """Return token ids unchanged, or those of a text, with special tokens such as BOS unless it starts with BOS."""
    if not isinstance(prompt, str):
        return prompt
    bos = tokenizer.bos_token
    return tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))


def _responses(
    detokenizer: Any, generated: Generated, stats: Stats, stops: Collection[int]
) -> Generator[GenerationResponse, None, None]:
    """Yield a response for each generated token; the last one has the finish reason "stop" or "length"."""
    with closing(generated):
        for each in generated:
            reason = "length" if stats.generation_tokens == stats.max_tokens else None
            yield text_response(detokenizer, each, stats, "stop" if each[0] in stops else reason)


def text_response(detokenizer: Any, generated: Yielded, stats: Stats, reason: str | None) -> GenerationResponse:
    """Return the response for a generated token (token, logprobs, from_draft), with the text that it completes.

    reason: None before the last token; then "length", or "stop" if the token is a stop token, which adds no text.
    """
    token, logprobs, from_draft = generated
    if reason != "stop":
        detokenizer.add_token(token)
    if reason:
        detokenizer.finalize()
    return GenerationResponse(
        text=detokenizer.last_segment,
        token=token,
        logprobs=logprobs,  # type: ignore[arg-type] - None without logprobs=True
        from_draft=from_draft,
        prompt_tokens=stats.prompt_tokens,
        prompt_tps=stats.prompt_tps,
        generation_tokens=stats.generation_tokens,
        generation_tps=stats.generation_tps,
        peak_memory=stats.peak_memory / 1e9,
        finish_reason=reason,
        stats=stats,
    )


@checked.explained
def generate(model: Target, tokenizer: Any, prompt: Prompt, verbose: bool = False, **options: Any) -> str:
    """Return the whole text of `stream_generate`. verbose: also print it as it arrives, then speeds and memory."""
    checked.check_values({"verbose": verbose})
    responses = stream_generate(model, tokenizer, prompt, **options)
    return "".join(response.text for response in (_shown(responses) if verbose else responses))


def _shown(responses: Iterator[GenerationResponse]) -> Iterator[GenerationResponse]:
    out, last = sys.stdout, None
    out.write(f"{RULE}\n")
    for last in responses:
        out.write(last.text)
        out.flush()
        yield last
    assert last is not None
    out.write(f"\n{RULE}\nPrompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n")
    out.write(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n")
    out.write(f"Peak memory: {last.peak_memory:.3f} GB\n")


@checked.explained
def batch_generate(
    model: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    prompt_caches: Sequence[Any] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Any,
) -> BatchResponse:
    """Generate a text for each prompt, decoded in one batch, with mlx_lm's arguments and response.

    prompts: texts or token ids. prompt_caches: one per prompt, which the prompt continues; they stay unchanged.
    max_tokens: one number, or one per prompt. verbose: print the number of finished texts. return_prompt_caches,
    return_token_ids, return_logprobs: return each prompt's cache, and lists without the stop token. Other options are
    those of `BatchGenerator`; `images`: for each prompt its images as in `stream_generate`, or None; `resize_shape`.
    """
    checked.check_values({**locals(), **options, "max_tokens": 1})  # a list of max_tokens is checked for each prompt
    checked.check_names(options)
    images, shape = options.pop("images", None), options.pop("resize_shape", None)
    each = zip(prompts, for_each("images", images, None, len(prompts)), strict=True)
    given = [with_images(model, tokenizer, encoded(tokenizer, prompt), own, shape) for prompt, own in each]
    ids, pictures = [tokens for tokens, _ in given], [found for _, found in given]
    one = isinstance(max_tokens, str) or not hasattr(max_tokens, "__len__")
    limits = [max_tokens] * len(ids) if one else max_tokens
    if prompt_caches is None and return_prompt_caches:
        layout = checked.cache_options(options)
        prompt_caches = [make_prompt_cache(model, **layout) for _ in ids]
    stops = {*options.pop("stop_tokens", ()), *tokenizer.eos_token_ids}
    if options.get("grammar") is not None:
        options["grammar"] = compiled(options["grammar"], tokenizer, model.vocab_size)
    batch = BatchGenerator(model, stop_tokens=[[token] for token in stops], logprobs=return_logprobs, **options)
    answers: list[list[Response]] = [[] for _ in ids]
    finished = 0
    try:
        batch.insert(ids, limits, prompt_caches, pictures=pictures)
        with batch.stats() as stats:
            for response in chain.from_iterable(iter(batch.next_generated, [])):
                answers[response.uid].append(response)
                if response.finish_reason and verbose:
                    finished += 1
                    sys.stdout.write(f"[batch_generate] Finished processing {finished}/{len(ids)} ...\n")
                    sys.stdout.flush()
    finally:
        batch.close()
    caches: list[Any] = [answer[-1].prompt_cache for answer in answers]
    answers = [[r for r in answer if r.finish_reason != "stop"] for answer in answers]
    tokens = [[r.token for r in answer] for answer in answers]
    return BatchResponse(
        texts=[tokenizer.decode(each) for each in tokens],
        stats=stats,
        caches=caches if return_prompt_caches else None,
        token_ids=tokens if return_token_ids else None,
        logprobs=[[float(r.logprobs[r.token]) for r in a] for a in answers] if return_logprobs else None,
    )
