"""Answer one request, step by step: read what is new of the prompt chunk by chunk, then decode cycle by cycle."""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_lm.sample_utils import make_logits_processors

from ..cache.prompt_cache import PromptCache
from ..decoding.memory_needs import RESERVED_TOKENS, check_prompt
from ..decoding.sampling import LogitsProcessor
from ..decoding.stats import Stats
from ..generate import generate_step, stream_generate
from ..machine.errors import first_line
from .answer import Part, Said, Splitter
from .continued import Continuation
from .failures import dropped
from .frames import REASONING, FramedSplitter, Frames, begun_in
from .logprobs import token_logprob
from .prefix_files import PrefixFiles
from .prefixes import LAST, PrefixTree, comparisons
from .together import Responses, Together
from .token_rules import NO_RULES, TokenRules
from .tool_calls.call_format import CallFormat

log = logging.getLogger("mlx_mtp.serve")


@dataclass(frozen=True)
class Ask:
    """Everything that decides one answer.

    prompt:  token ids. turns: where other prompts may begin to differ from it.
    sampling: keyword arguments of `stream_generate`; penalties: of mlx-lm's `make_logits_processors`.
    logprobs: how many likeliest tokens to tell beside each, None for no log probabilities.
    rules:   for the tokens of the answer.
    chat:    reasoning and calls are told apart; thinking: the prompt ends within reasoning.
    continues: the prompt ends within an answer, whose text goes on with the first token.
    one_call: end behind the first call of a tool.
    follows: makes, of the answer's parts, the beginning of the prompt that may come next; None: nothing is known.
    after_tool: the prompt ends with a tool result.
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
    follows: Callable[[list[Part]], list[int]] | None = None
    after_tool: bool = False


class Begun(NamedTuple):
    """The prompt was accepted; cached: tokens of it that need not be read again."""

    cached: int


class End(NamedTuple):
    """An answer is over.

    reason: "stop", "length" or "tool_calls". stop: the string that ended it. cached: tokens of the prompt that were
    not read again. first_token: seconds from the request to it. reasoning_tokens: how many of the answer's were that.
    """

    reason: str
    stop: str | None
    stats: Stats
    cached: int
    first_token: float
    reasoning_tokens: int

    @property
    def drafts(self) -> tuple[int, int]:
        """Count the drafts that were verified, and those that were right."""
        stats = self.stats
        return sum(stats.drafted) + stats.lookup_drafted, sum(stats.accepted) + stats.lookup_accepted


class Failed(NamedTuple):
    """A request ended in an error, with this HTTP status."""

    status: int
    message: str


class Interrupted(Exception):
    """Thrown into `answer` to end it early: its client has disconnected, or its time limit is over."""


Event = Begun | Part | End | Failed
LOST = Failed(500, "the request failed")


@dataclass(eq=False)
class Job:
    """One answer of a request, from its submission to its end.

    emit: sends an event to the client, from the engine's thread. cancelled: no client waits for it. reading: its
    prompt is not read to the end. over: the engine has finished with it. lost: an event did not reach its client.
    """

    ask: Ask
    emit: Callable[[Event], None]
    deadline: float = float("inf")
    cancelled: bool = False
    begun: float = field(default_factory=time.monotonic)
    parts: list[Part] = field(default_factory=list)
    reading: bool = True
    over: bool = False
    lost: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def tell(self, event: Event) -> None:
        """Send an event to the client. Behind one that could not be sent nothing follows but LOST, so that no answer
        looks whole that is not; the job is cancelled then.
        """
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
    """A loaded model, and what all its answers share.

    options: defaults of `stream_generate`'s keyword arguments. together: decodes all answers; without it, as on
    several ranks, each takes cycles of its own. frames: of the parts of an answer.
    """

    model: Any
    tokenizer: Any
    tree: PrefixTree
    options: dict[str, Any]
    tool_format: CallFormat | None
    files: PrefixFiles | None = None
    together: Together | None = None
    frames: Frames | None = None

    @property
    def ranks(self) -> Any:
        """What splits the model over several machines; None where nothing does."""
        return self.model.ranks


def answer(served: Served, job: Job, crowded: Callable[[], bool]) -> Generator[None, None, PromptCache | None]:
    """Answer a request, yielding after every step; return its cache, also when `Interrupted` is thrown in.

    crowded: others' steps come in between, so time tells nothing.
    """
    ask = job.ask
    held = [_reused(served, ask.prompt, len(ask.prompt) + min(ask.max_tokens, RESERVED_TOKENS))]
    most, cached = _agreed(served, held[0], ask), held[0].offset
    job.tell(Begun(cached))
    with contextlib.suppress(Interrupted):
        for _ in read(served, held[0], ask.prompt, ask.turns, spare=served.tree.uncut):
            yield
        job.reading = False
        yield from _decode(served, job, held, most, cached, crowded)
    return held[0] if held else None


def _reused(served: Served, prompt: list[int], room: int) -> PromptCache:
    """Make a cache of what is stored of a prompt, with room for so many positions; an empty one where that fails."""
    if served.files:
        with dropped("a prefix file was not read"):
            served.files.load(served.tree, prompt)
    with dropped("no prefix was reused", served.tree.clear):
        return served.tree.take(prompt, room)
    return served.tree.blank.like_new()


def _agreed(served: Served, cache: PromptCache, ask: Ask) -> int:
    """Do as `_fitting`, which on several ranks is for rank 0 to say."""
    if not served.ranks:
        return _fitting(served, cache, ask)
    try:
        found: Any = None if served.ranks.rank else _fitting(served, cache, ask)
    except Exception as e:  # the other ranks wait for a word
        found = first_line(e)
    found = served.ranks.broadcast(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _fitting(served: Served, cache: PromptCache, ask: Ask) -> int:
    """Cut an answer to what there is memory for; raises ValueError where there is not even for the prompt."""
    rest, most = len(ask.prompt) - cache.offset, ask.max_tokens
    while True:
        try:
            check_prompt(served.model, cache, rest, most, served.tree.chunking.step, ignore=False)
            return most
        except ValueError:
            if most == 1:
                raise
        most //= 2


def read(
    served: Served, cache: PromptCache, prompt: list[int], turns: tuple[int, ...], *, spare: int = 0
) -> Iterator[int]:
    """Read whole chunks of a prompt, never its last token, and remember them; yield how far it has come.

    Where it is closed early, the next request can go on from the last chunk, whatever the caches hold.
    spare: most tokens that are left to read in one pass, though a chunk ends among them.
    """
    cuts = served.tree.chunking.cuts(prompt)
    resumes = {max((cut for cut in cuts if cut <= place), default=0) for place in (*turns, len(prompt))}
    for end in cuts:
        if end > cache.offset and len(prompt) - cache.offset > spare:
            _read_to(served, cache, prompt[:end])
            with dropped("a prefix was not stored", served.tree.clear):
                served.tree.store(cache, resumes=end in resumes)
            try:
                yield end
            except BaseException:
                with dropped("a prefix was not stored", served.tree.clear):
                    served.tree.store(cache, resumes=True)
                raise


def _read_to(served: Served, cache: PromptCache, text: list[int]) -> None:
    """Read what a cache lacks of a text."""
    options: Any = {"prompt_cache": cache, "num_draft_tokens": served.options["num_draft_tokens"]}
    options |= {"check_memory": False, "prefill_step_size": served.tree.chunking.step}
    next(generate_step(text[cache.offset :], served.model, max_tokens=0, **options), None)


def reread(served: Served, prompt: list[int], cache: PromptCache | None = None) -> Iterator[int]:
    """Read a conversation with its answer as a prompt, a chunk at a time: it is what the next one begins with.

    cache: what decoding the answer left, which saves reading it where its rows are as if read.
    """
    return _read_on(served, prompt, keep(served, prompt, cache))


def _read_on(served: Served, prompt: list[int], cache: PromptCache | None) -> Iterator[int]:
    if served.tree.stores:
        yield from read(served, cache or served.tree.take(prompt, len(prompt)), prompt, ())


def keep(served: Served, prompt: list[int], cache: PromptCache | None) -> PromptCache | None:
    """Do as `PrefixTree.keep`; None where there is no cache."""
    if cache is not None:
        with dropped("a prefix was not stored", served.tree.clear):
            return served.tree.keep(prompt, cache)
    return None


def read_end(served: Served, prompt: list[int]) -> Iterator[int]:
    """Read all but the last token of a prompt that was answered and may be asked again.

    Only where all rows are alike, so that it need not be cut into the same chunks each time.
    """
    end = len(prompt) - 1
    if served.tree.decoded and 0 < end - served.tree.covered(prompt) <= served.tree.chunking.step:
        cache = served.tree.take(prompt, len(prompt))
        _read_to(served, cache, prompt[:end])
        with dropped("a prefix was not stored", served.tree.clear):
            served.tree.insert(cache, is_rest=True)
        yield end


def store(served: Served) -> bool:
    """Write a piece of what is remembered to a file; return whether there may be more to write."""
    return served.files is not None and served.files.step(served.tree)


def compare_rows(served: Served) -> Iterator[bool]:
    """Decide whether the tree may store answers as decoding left them, a forward pass at a time; until then it stores
    only what was read as a prompt.

    Yields what is known so far.
    """
    tree = served.tree
    for found in comparisons(served.model, tree.blank, max(tree.chunking.step, 2 * LAST)):
        tree.decoded = found
        yield found


def _decode(
    served: Served, job: Job, held: list[PromptCache], most: int, cached: int, crowded: Callable[[], bool]
) -> Generator[None, None, None]:
    """Decode the answer, and tell its parts as they are known. held: the cache, as `Together.decode` takes it."""
    ask, stats = job.ask, Stats()
    splitter = _splitter(served, ask)
    begun = Continuation(served.tokenizer, ask.prompt) if ask.continues else None
    options = {**served.options, **ask.sampling, "max_tokens": most, "stats": stats}
    options["logprobs"] = ask.logprobs is not None
    if processors := _processors(served, ask):
        options["logits_processors"] = [*(options.get("logits_processors") or ()), *processors]
    options["stop_tokens"] = (*options.get("stop_tokens", ()), *ask.rules.stop_tokens)
    reasoned, first, reason, rest = 0, 0.0, "stop", ask.prompt[held[0].offset :]
    together = served.together
    responses = together.decode(rest, held, options) if together else _alone(served, rest, held[0], options, crowded)
    with contextlib.closing(responses):
        for response in responses:
            if response is None:
                yield
                continue
            reason = response.finish_reason or "stop"
            first = first or time.monotonic() - job.begun
            text = begun.text_of(response) if begun else response.text
            if begun and ask.thinking and (breaks := begun.line_breaks(text)):
                _tell(job, [Said(breaks, reasoning=True)])  # the splitter drops those in front of reasoning
            found = splitter.feed(text, token_logprob(served.tokenizer, response, ask.logprobs))
            reasoned += splitter.reasoning
            _tell(job, found)
            if splitter.stopped is not None or (ask.one_call and splitter.called):
                reason = "stop"  # even if it is the last token that may come
                break
    _tell(job, splitter.end(cut=reason == "length"))
    reason = "stop" if splitter.stopped is not None else reason
    reason = "tool_calls" if splitter.called and reason == "stop" else reason
    job.tell(End(reason, splitter.stopped, stats, cached, first, reasoned))


def _splitter(served: Served, ask: Ask) -> Splitter | FramedSplitter:
    """A splitter for the answer, which knows the frame within which the prompt ends."""
    framed = ask.chat and served.frames is not None
    thinking = ask.chat and served.tokenizer.has_thinking and not framed
    splitter = Splitter(
        served.tokenizer, ask.stops, thinking=thinking, begun=ask.thinking and not framed,
        tool_format=served.tool_format, tools=ask.tools, one_call=ask.one_call,
    )  # fmt: skip
    if not (framed and served.frames):
        return splitter
    begun = begun_in(served.frames, served.tokenizer.decode(ask.prompt)) if ask.continues else None
    return FramedSplitter(served.frames, splitter, REASONING if ask.thinking else begun)


def _processors(served: Served, ask: Ask) -> list[LogitsProcessor]:
    penalties = make_logits_processors(**ask.penalties) if ask.penalties else []
    return [*penalties, *ask.rules.processors(served.tokenizer, len(ask.prompt))]


def _alone(
    served: Served, prompt: list[int], cache: PromptCache, options: dict[str, Any], crowded: Callable[[], bool]
) -> Responses:
    """Decode an answer in cycles of its own, as `Together.decode`: others' may come where None is yielded."""
    step, stats, cycles = served.tree.chunking.step, options["stats"], 0
    options = {**options, "prompt_cache": cache, "prefill_step_size": step, "check_memory": False}
    responses: Any = stream_generate(served.model, served.tokenizer, prompt, **options)
    with contextlib.closing(responses):
        for response in responses:
            stats.crowded = crowded()
            yield response
            if stats.cycles != cycles:
                cycles = stats.cycles
                yield None


def _tell(job: Job, parts: list[Part]) -> None:
    for part in parts:
        job.parts.append(part)
        job.tell(part)
