"""Generate one choice of a response in steps: prefill the new part of the prompt by chunks, then decode by cycles."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ..cache.prompt_cache import PromptCache
from ..decoding.buffer_count import Buffers
from ..decoding.logit_rules import LogitRules
from ..decoding.memory_needs import RESERVED_TOKENS
from ..decoding.picture_rows import encoding
from ..decoding.stats import Stats
from ..generate import generate_step
from ..grammar import Constraint
from ..machine.stream import in_turns
from ..pictures.rows import Picture, mark_ids
from .answer import AnswerPart, Splitter, TextPart
from .batch_decoder import BatchDecoder, decode_alone
from .continued import Continuation
from .failures import dropped
from .frames import REASONING, FramedSplitter, Frames, begun_in
from .max_tokens import agreed_max_tokens
from .prefix_files import PrefixFiles
from .prefixes import LAST, PrefixTree, comparisons
from .token_rules import NO_RULES, TokenRules, token_logprob
from .tool_calls.call_format import CallFormat


@dataclass(frozen=True)
class DecodeRequest:
    """The prompt and the options of one choice of a response.

    prompt:   token ids; rows of pictures are negative. pictures: those of the prompt, in its order.
    turns:    positions at which later prompts may start to differ from the prompt. stops: stop strings.
    sampling: keyword arguments of `stream_generate`; penalties: of `LogitRules`.
    logprobs: number of most likely tokens to return with each token; None for no log probabilities.
    chat:     split the text into reasoning, content and tool calls; one_call: end after the first tool call.
    tools:    functions that the answer may call, in OpenAI's form, or None; rules: excluded tokens.
    thinking: the prompt ends within reasoning; continues: it ends within an answer; after_tool: a tool
              result follows its last answer.
    follows:  encodes the start of the next turn's prompt, given the parts of this answer; None if that is unknown.
    adapter:  name of the adapter to decode with; None for the server's default.
    grammar:  the compiled grammar that the answer must match; None for a free answer.
    progress: send a `Prefilled` after each step of the prefill.
    """

    prompt: list[int]
    turns: tuple[int, ...] = ()
    max_tokens: int = 256
    sampling: dict[str, Any] = field(default_factory=dict)
    penalties: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    chat: bool = False
    thinking: bool = False
    tools: Any = None
    one_call: bool = False
    rules: TokenRules = NO_RULES
    continues: bool = False
    follows: Callable[[list[AnswerPart]], list[int]] | None = None
    after_tool: bool = False
    adapter: str | None = None
    grammar: Constraint | None = None
    progress: bool = False
    pictures: tuple[Picture, ...] = ()


class Begun(NamedTuple):
    """An event: the prompt was accepted, before its prefill; `cached` of its tokens come from the prefix cache."""

    cached: int


class Prefilled(NamedTuple):
    """An event: a prefill chunk has ended.

    done: number of the prompt's first tokens in the cache. The last event need not have all tokens: a rest shorter
    than a chunk is prefilled without an event.
    """

    done: int


class End(NamedTuple):
    """An event: the answer has ended.

    reason: "stop", "length" or "tool_calls". stop: the stop string that ended it, or None. cached: number of prompt
    tokens from the prefix cache. first_token: seconds from the request to the first token, 0.0 without one.
    reasoning_tokens: number of tokens after which the text was inside reasoning.
    """

    reason: str
    stop: str | None
    stats: Stats
    cached: int
    first_token: float
    reasoning_tokens: int

    @property
    def drafts(self) -> tuple[int, int]:
        """Numbers of verified and of accepted drafts, of all sources together."""
        return self.stats.every_draft


class RequestFailed(NamedTuple):
    """An event: the request failed, with this HTTP status."""

    status: int
    message: str


class JobInterrupted(Exception):
    """Thrown into the generator of `answer` or of a prefill to end it early."""


Event = Begun | Prefilled | AnswerPart | End | RequestFailed
LOST = RequestFailed(500, "the request failed; the server's log has the reason")


@dataclass(eq=False)
class Job:
    """One choice of a response in the engine's queue or among its active jobs.

    emit: passes an event from the engine's thread to the client's. begun: time.monotonic() at which the request
    arrived. parts: those of the answer so far. prefilling: the prompt is not complete in the cache. finished: removed
    from the engine. lost: an event did not reach the client. cancelled, deadline (of time.monotonic()): the engine
    ends the job at its next step.
    """

    request: DecodeRequest
    emit: Callable[[Event], None]
    deadline: float = float("inf")
    cancelled: bool = False
    begun: float = field(default_factory=time.monotonic)
    parts: list[AnswerPart] = field(default_factory=list)
    prefilling: bool = True
    finished: bool = False
    lost: bool = False

    def send(self, event: Event) -> None:
        """Send an event to the client; if that fails, cancel the job and send LOST last. Never raises."""
        if self.lost:
            return
        try:
            self.emit(event)
        except BaseException:
            self.lost = self.cancelled = True
            with dropped("an event did not reach its client"):
                with contextlib.suppress(BaseException):
                    self.emit(LOST)
                raise


class Served(NamedTuple):
    """A loaded model with its tokenizer, its prefix cache and the options of all jobs.

    options: default keyword arguments of `stream_generate`. batch: decodes all active jobs in shared passes; None on
    several ranks, where each job decodes alone. frames: marks between which the model writes the parts of an answer.
    tool_format: of calls in answers; None: calls stay text. files: of the prefix cache; None: it is not in files.
    apart: the same with each adapter that requests can select, whose prefix cache and batch are its own. buffers:
    numbers of the model's Metal buffers.
    """

    model: Any
    tokenizer: Any
    tree: PrefixTree
    options: dict[str, Any]
    tool_format: CallFormat | None
    files: PrefixFiles | None = None
    batch: BatchDecoder | None = None
    frames: Frames | None = None
    apart: Mapping[str, "Served"] = MappingProxyType({})
    buffers: Buffers = Buffers()

    @property
    def ranks(self) -> Any:
        """The group of ranks that the model is split over; None for a single process."""
        return self.model.ranks


def with_adapter(served: Served, name: str | None) -> Served:
    """Return the model as served with an adapter; None, or an adapter that is always in use: `served` itself."""
    return served if name is None else served.apart.get(name, served)


def answer(served: Served, job: Job, crowded: Callable[[], bool]) -> Generator[None, None, PromptCache | None]:
    """Generate one choice, yielding after each step of the prefill and each cycle; send events with `job.send`.

    Return its prompt cache, also after an `JobInterrupted`, which sends no End; None if a batch could not copy it.
    Raises ValueError if the prompt and one token do not fit in memory, and any exception of decoding.
    crowded: returns whether other jobs run between the steps, so that measured times are invalid.
    """
    request, served = job.request, with_adapter(served, job.request.adapter)
    caches = [_reused(served, request.prompt, len(request.prompt) + min(request.max_tokens, RESERVED_TOKENS))]
    max_tokens, cached = agreed_max_tokens(served, caches[0], request), caches[0].offset
    caches[0].name_pictures(request.pictures)
    job.send(Begun(cached))
    with contextlib.suppress(JobInterrupted):
        sent = cached
        for done in prefill(served, caches[0], request.prompt, request.turns, spare=served.tree.uncut_tail):
            if request.progress and done > sent:  # while a picture is encoded, `done` stays the same
                job.send(Prefilled(sent := done))
            yield
        job.prefilling = False
        yield from _decode(served, job, caches, max_tokens, cached, crowded)
    job.request = replace(request, pictures=tuple(replace(picture, image=None) for picture in request.pictures))
    return caches[0] if caches else None


def _reused(served: Served, prompt: list[int], room: int) -> PromptCache:
    """Return a cache with the longest stored prefix of a prompt, in memory or files. room: as for `PrefixTree.take`.

    It is empty if none is stored, or if reading one fails, which clears the tree.
    """
    if served.files:
        with dropped("a prefix file was not read"):
            served.files.load(served.tree, prompt)
    with dropped("no prefix was reused", served.tree.clear):
        return served.tree.take(prompt, room)
    return served.tree.blank.like_new()


def prefill(
    served: Served, cache: PromptCache, prompt: list[int], turns: tuple[int, ...], *, spare: int = 0
) -> Iterator[int]:
    """Append to `cache` the complete chunks of a prompt that it lacks; store each and yield its end position.

    Before a chunk with pictures that must be encoded, yield the cache's unchanged position each time that `encoding`
    yields. The tokens after the last chunk remain for decoding, and so do up to `spare` tokens even if chunks end
    among them.
    turns: positions before which the last chunk gets a checkpoint, as the last of all does. If the generator is
    closed early, the last chunk prefilled gets one too, so that a prompt can continue there.
    """
    cuts = served.tree.chunking.cuts(prompt)
    resumable = {max((cut for cut in cuts if cut <= place), default=0) for place in (*turns, len(prompt))}
    for end in cuts:
        if end > cache.offset and len(prompt) - cache.offset > spare:
            rest = prompt[cache.offset : end]
            yield from _resumable(served, cache, (cache.offset for _ in encoding(served.model, cache, rest)))
            _prefill_to(served, cache, prompt[:end])
            with dropped("a prefix was not stored", served.tree.clear):
                served.tree.store(cache, resumable=end in resumable)
            yield from _resumable(served, cache, [end])


def _resumable(served: Served, cache: PromptCache, steps: Iterable[int]) -> Iterator[int]:
    """Yield the steps; if the generator is closed early, or a step fails, give `cache`'s last chunk a checkpoint."""
    try:
        yield from steps
    except BaseException:
        with dropped("a prefix was not stored", served.tree.clear):
            if cache.offset:
                served.tree.store(cache, resumable=True)
        raise


def _prefill_to(served: Served, cache: PromptCache, tokens: list[int]) -> None:
    """Append to a cache the tokens that it lacks."""
    options: Any = {"prompt_cache": cache, "num_draft_tokens": served.options["num_draft_tokens"]}
    options |= {"check_memory": False, "prefill_step_size": served.tree.chunking.step}
    with served.tree.adapted():
        next(generate_step(tokens[cache.offset :], served.model, max_tokens=0, **options), None)


def prefill_next(served: Served, prompt: list[int], cache: PromptCache | None = None) -> Iterator[int]:
    """Prefill the complete chunks of a conversation's next prompt and store each; yield as `prefill` does.

    cache: the cache after decoding; if the tree may hold decoded rows, those that the prompt shares are stored at the
    call, before the first step, and not computed again. Without a tree that stores there is no step.
    """
    return _prefill_on(served, prompt, keep(served, prompt, cache))


def _prefill_on(served: Served, prompt: list[int], cache: PromptCache | None) -> Iterator[int]:
    if served.tree.stores:
        yield from prefill(served, cache or served.tree.take(prompt, len(prompt)), prompt, ())


def keep(served: Served, prompt: list[int], cache: PromptCache | None) -> PromptCache | None:
    """Return `PrefixTree.keep(prompt, cache)`; None without a cache, or on failure, which clears the tree."""
    if cache is not None:
        with dropped("a prefix was not stored", served.tree.clear):
            return served.tree.keep(prompt, cache)
    return None


def prefill_tail(served: Served, prompt: list[int]) -> Iterator[int]:
    """Prefill and store all but the last token of a prompt, in case it is repeated.

    Yields the end position of these tokens, once. Does nothing and yields nothing if the tree has them all or lacks
    more than a chunk of them, or unless the tree may hold decoded rows: other trees store complete chunks only.
    """
    end = len(prompt) - 1
    if served.tree.decoded and 0 < end - served.tree.covered(prompt) <= served.tree.chunking.step:
        cache = served.tree.take(prompt, len(prompt))
        _prefill_to(served, cache, prompt[:end])
        with dropped("a prefix was not stored", served.tree.clear):
            served.tree.insert(cache, is_tail=True)
        yield end


def compare_rows(served: Served) -> Iterator[bool]:
    """Set `decoded` of each tree and yield it, with one forward pass per step.

    The value is False until the tree's comparison has ended.
    """
    for tree in served.tree.trees:
        steps = comparisons(served.model, tree.blank, max(tree.chunking.step, 2 * LAST))
        for found in in_turns(steps, tree.adapted):
            tree.decoded = found
            yield found


def _decode(
    served: Served, job: Job, caches: list[PromptCache], max_tokens: int, cached: int, crowded: Callable[[], bool]
) -> Generator[None, None, None]:
    """Decode the answer; send its parts and End, yielding after each cycle. caches: as in `BatchDecoder.decode`.

    cached: number of prompt tokens from the prefix cache. crowded: as in `answer`.
    """
    request, stats = job.request, Stats()
    splitter = _splitter_for(served, request)
    begun = Continuation(served.tokenizer, request.prompt) if request.continues else None
    options = {**served.options, **request.sampling, "max_tokens": max_tokens, "stats": stats}
    options |= {"logprobs": request.logprobs is not None, "grammar": request.grammar}
    options["pictures"] = request.pictures
    rules = request.penalties | request.rules.arguments(served.tokenizer, len(request.prompt))
    if rules:
        options["logits_processors"] = [*(options.get("logits_processors") or ()), LogitRules(**rules)]
    options["stop_tokens"] = (*options.get("stop_tokens", ()), *request.rules.stop_tokens)
    reasoned, first, reason, rest = 0, 0.0, "stop", request.prompt[caches[0].offset :]
    if served.batch:
        responses = served.batch.decode(rest, caches, options)
    else:
        options |= {"prompt_cache": caches[0], "prefill_step_size": served.tree.chunking.step, "check_memory": False}
        with served.tree.adapted():
            responses = decode_alone(served.model, served.tokenizer, rest, options, crowded)
    with contextlib.closing(responses):
        for response in responses:
            if response is None:
                yield
                continue
            reason = response.finish_reason or "stop"
            first = first or time.monotonic() - job.begun
            text = begun.text_of(response) if begun else response.text
            if begun and request.thinking and (breaks := begun.line_breaks(text)):
                _send(job, [TextPart(breaks, reasoning=True)])  # the splitter drops line breaks before reasoning
            found = splitter.feed(text, token_logprob(served.tokenizer, response, request.logprobs))
            reasoned += splitter.reasoning
            _send(job, found)
            if splitter.stopped is not None or (request.one_call and splitter.called):
                reason = "stop"  # even for the last token that max_tokens allows
                break
    _send(job, splitter.end(cut=reason == "length"))
    reason = "stop" if splitter.stopped is not None else reason
    reason = "tool_calls" if splitter.called and reason == "stop" else reason
    job.send(End(reason, splitter.stopped, stats, cached, first, reasoned))


def _splitter_for(served: Served, request: DecodeRequest) -> Splitter | FramedSplitter:
    """Return the splitter of a job, in the state in which the prompt ends."""
    framed = request.chat and served.frames is not None
    thinking = request.chat and served.tokenizer.has_thinking and not framed
    splitter = Splitter(
        served.tokenizer, request.stops, thinking=thinking, begun=request.thinking and not framed,
        tool_format=served.tool_format, tools=request.tools, one_call=request.one_call,
    )  # fmt: skip
    if not (framed and served.frames):
        return splitter
    prompt = mark_ids(request.prompt, served.model.vision.mark) if request.pictures else request.prompt
    begun = begun_in(served.frames, served.tokenizer.decode(prompt)) if request.continues else None
    return FramedSplitter(served.frames, splitter, REASONING if request.thinking else begun)


def _send(job: Job, parts: list[AnswerPart]) -> None:
    for part in parts:
        job.parts.append(part)
        job.send(part)
