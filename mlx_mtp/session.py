"""Hold a conversation with a model: its messages, and the caches of the tokens already processed.

Every turn renders and tokenizes the whole conversation again, so the prompt never depends on the caches. They are
reused if their tokens are a prefix of the new prompt. If the chat template changed an earlier answer, or an answer
tokenizes differently, they roll back to a snapshot before the first difference.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .cache.from_mlx_lm import from_mlx_lm
from .cache.make_cache import make_prompt_cache
from .cache.mark import Mark, Quantizing
from .cache.prompt_cache import PromptCache
from .cache.prompt_prefix import shared
from .checkpoint.chat_template import encode_messages, pictures_of
from .decoding.buffer_count import KEPT_SNAPSHOTS
from .decoding.memory_needs import check_prompt, stated_positions, within
from .decoding.options import cache_options, check_values, default_chunk, default_draft_tokens
from .decoding.stats import Stats
from .generate import GenerationResponse, generate_step, stream_generate
from .grammar import compiled
from .layers.target import Target
from .machine.stream import in_turns
from .pictures.prompt import opened
from .pictures.rows import Picture
from .tuning.idle_trials import IdleTrials

Progress = Callable[[int, int], None]
Responses = Generator[GenerationResponse, None, None]


class Stopped(Exception):
    """Raised between two chunks of a prefill if `ChatSession.stopping` is set; `ask` catches it."""


@dataclass
class Turn:
    """Token counts and times of one turn. stats: those of the answer.

    prompt_tokens: tokens of the whole conversation before the answer. reused: those that the caches contained.
    prompt_time: seconds for prefilling the new part up to the generation prompt, which `stats` does not include.
    """

    prompt_tokens: int
    reused: int = 0
    prompt_time: float = 0.0
    stats: Stats = field(default_factory=Stats)

    @property
    def prompt_tps(self) -> float:
        """Prefill speed: new prompt tokens per second, up to the first token of the answer.

        Earlier it is 0.0, or, after the first part of the prefill, too high.
        """
        new, seconds = self.prompt_tokens - self.reused, self.prompt_time + self.stats.prefill_time
        return new / seconds if seconds else 0.0


class ChatSession:
    """A conversation: `ask` sends a message and yields the answer; `messages` contains the conversation so far.

    A message is {"role", "content"}, with "pictures", a tuple of `Picture`s, if it has any: they precede its text.
    cache: its `PromptCache`; `reset`, and turns that can reuse none of it or follow an exception, may replace it.
    turn: the `Turn` of the last message. answers: number of answers, also of conversations before `reset`.
    num_draft_tokens: maximum drafts per cycle; may change between turns.
    stopping: set it in a signal handler or another thread to end the current turn; the end of the turn clears it.
    """

    def __init__(
        self,
        model: Target,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        template_config: dict[str, Any] | None = None,
        **options: Any,
    ):
        """template_config: variables of the chat template. options: those of `stream_generate`; with max_tokens=-1 an
        answer ends at the latest when the conversation has `positions` tokens.

        The first message continues the prompt of a given `prompt_cache`; unless the cache is empty, its system
        prompt and template_config are used. Raises ValueError for an option out of range, for a cache that contains
        tokens without the start of a conversation, and for a system_prompt or template_config other than the cache's.
        """
        self.model, self.tokenizer, self.template_config = model, tokenizer, template_config or {}
        self.ranks = model.ranks
        check_values(options)
        if options.get("grammar") is not None:
            options["grammar"] = compiled(options["grammar"], tokenizer, model.vocab_size)
        generate_step([0], model, **options).close()  # checks the options, computes nothing
        self._asked = k = options.pop("num_draft_tokens", None)
        self.num_draft_tokens = default_draft_tokens(model) if k is None else k
        layout = cache_options(options)
        self._given, self._prefix_text = from_mlx_lm(model, options.pop("prompt_cache", None)), ""
        self._prefix_pictures: tuple[Picture, ...] = ()
        if self._given is not None:
            system_prompt = self._adopt(self._given, system_prompt)
            self._given_snapshot = (self._given.snapshot(), self._given.quantizing)
        self._blank = self._given.like_new() if self._given else make_prompt_cache(model, **layout)
        self._intact = True  # False while a turn may write to the caches
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self.options, self.stopping, self.answers = options, False, 0
        self.reset()

    def reset(self) -> None:
        """Start a new conversation with the same system prompt.

        Its caches are empty, or contain the prompt of the given `prompt_cache` if that is still in use: a turn that
        an exception ended while it computed, or that could reuse none of it, replaces it by empty caches, and so does
        `reset` if it cannot be rolled back. The count of answers continues, so that seeded draws do not repeat.
        """
        self.messages, self.turn = self._system, Turn(0)
        if self._given is not None and self._intact:
            self.cache = self._given
            self._rewind([self._given_snapshot], self._given_snapshot[0].length)
        else:
            self._start_over()
        self._intact = True

    def resume(self, messages: list[dict[str, Any]], answers: int) -> None:
        """Replace the conversation by these messages, and the count of answers, which seeded draws depend on.

        messages: as in `messages`; a first message of role "system" becomes the system prompt, and without one
        there is none. The caches stay; the next turn reuses what fits. Raises ValueError, without a change, if the
        chat template refuses the messages with a question after them.
        """
        self._tokens([*messages, {"role": "user", "content": "?"}])
        self._system = [message for message in messages[:1] if message["role"] == "system"]
        self.messages, self.answers, self.turn = messages, answers, Turn(0)

    @property
    def system_prompt(self) -> str | None:
        """The system prompt, None if there is none. Setting it affects later answers, and raises as `resume` does."""
        return self._system[0]["content"] if self._system else None

    @system_prompt.setter
    def system_prompt(self, text: str) -> None:
        self.resume([{"role": "system", "content": text}, *self.messages[len(self._system) :]], self.answers)

    def _start_over(self) -> None:
        """Replace the caches by empty ones and drop all snapshots; the given cache is then not used again."""
        self._snapshots: list[tuple[Mark, Quantizing | None]] = []
        self.cache: PromptCache = self._blank.like_new()
        self._given = None

    def _adopt(self, cache: PromptCache, system_prompt: str | None) -> str | None:
        """Use the prompt and template_config of a given cache; return its system prompt.

        Of an empty cache without them, nothing is used, and `system_prompt` is returned. If the cache, empty or not,
        has fewer heads than the model, drafts per cycle are limited to their number. Raises as `__init__`.
        """
        if len(cache.heads) < len(self.model.head_windows()):
            self.num_draft_tokens = min(self.num_draft_tokens, len(cache.heads))
        prefix = cache.prefix
        if prefix is None and not cache.offset:
            return system_prompt
        if prefix is None or (self.tokenizer.has_chat_template and not prefix.template):
            raise ValueError(
                "prompt_cache: does not contain the start of a conversation; make it with `mlx-mtp cache-prompt` (if "
                "the model has a chat template, without --ignore-chat-template)"
            )
        prefix.check(system_prompt=system_prompt, template_config=self.template_config)
        self._prefix_text, self.template_config = prefix.prompt, prefix.template_config
        self._prefix_pictures = prefix.pictures
        return prefix.system_prompt

    @property
    def positions(self) -> int | None:
        """The maximum tokens of a conversation: the model's, or `max_context` if it is less; None without either."""
        limits = (stated_positions(self.model), self.options.get("max_context"))
        return min((limit for limit in limits if limit), default=None)

    def change(self, **options: Any) -> None:
        """Replace options of `stream_generate` in later turns; the others stay.

        Not for num_draft_tokens, prompt_cache, grammar and the options of the cache (kv_bits and so on), which only
        `__init__` reads. Raises ValueError, without a change, for an option out of range.
        """
        assert not options.keys() & {"num_draft_tokens", "prompt_cache", "grammar"}  # read by `__init__` alone
        changed = {**self.options, **options}
        generate_step([0], self.model, **changed).close()
        self.options = changed

    def take_back(self) -> str:
        """Remove the last message and its answer from the conversation, and return `last_message`, its text.

        The next turn reuses the caches of earlier messages if they can be rolled back. The count of answers stays, so
        that seeded draws do not repeat. Raises ValueError if there is no message.
        """
        text, self.messages = self.last_message, self.messages[:-2]
        return text

    @property
    def last_message(self) -> str:
        """Text of the user's last message, without the prompt of a given cache; ValueError if there is no message."""
        before = len(self.messages) - 2
        if before < len(self._system):
            raise ValueError("the conversation has no message yet")
        text = self.messages[before]["content"]
        return text.removeprefix(self._prefix_text) if before == len(self._system) else text

    @property
    def last_pictures(self) -> tuple[Picture, ...]:
        """The pictures of the user's last message, without those of a given cache; () if there is no message."""
        before = len(self.messages) - 2
        if before < len(self._system):
            return ()
        found: Any = self.messages[before].get("pictures", ())
        return found[len(self._prefix_pictures) :] if before == len(self._system) else found

    def idle(self) -> IdleTrials:
        """Return a context manager for the time in which the program waits, which runs pending kernel trials.

        After the first answer it also checks rows, on a GPU, on the conversation's tokens; see IdleTrials.
        """
        check = self.model.runtime.row_check if self.answers else None
        if check and not check.tokens:
            check.tokens, check.positions = [*self.cache.tokens], self.positions
        return IdleTrials(self.model, check)

    def ask(self, text: str, progress: Progress | None = None, images: Any = None) -> Responses:
        """Send a message and yield the answer's responses; `turn` contains the token counts and times.

        images: one or a list of paths, bytes of files, `data:` URLs, images of Pillow or `Picture`s; they precede the
        text. They are opened at the call, which raises ValueError if that fails or the model reads no pictures.
        Nothing else happens before the first step. Closing the iterator, an exception, or setting `stopping` ends the
        answer. The conversation keeps the yielded part, and drops the message if nothing was yielded. The first step
        raises ValueError if the chat template refuses the messages, the prompt has no token, or it does not fit in
        memory (unless check_memory=False), in `max_context` or, with max_tokens=-1, in `positions`.
        progress: called after each chunk with the number of new prompt tokens processed and their total.
        """
        return in_turns(self._answer(text, progress, opened(self.model, images)))

    def _answer(self, text: str, progress: Progress | None, pictures: list[Picture]) -> Responses:
        if len(self.messages) == len(self._system):
            text, pictures = self._prefix_text + text, [*self._prefix_pictures, *pictures]
        more = {"pictures": tuple(pictures)} if pictures else {}
        messages = [*self.messages, {"role": "user", "content": text, **more}]
        prompt, end = self._tokens(messages)
        if not self._intact:  # an exception ended the last turn, possibly during a write to the caches
            self._start_over()
        self._intact = False
        answer: list[str] = []
        try:
            found = self._responses(prompt, end, progress, pictures_of(messages))
            with suppress(Stopped, GeneratorExit), closing(found) as responses:
                for response in responses:
                    answer.append(response.text)
                    yield response
                    if self._stops_here():
                        break
            self._intact = True
        finally:
            self.stopping = False
            self._stops_here()
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
                self.answers += 1

    def _stops_here(self) -> bool:
        """Return whether to stop the answer now.

        On several ranks return False, and pass `stopping` to the ranks, which agree on a stop some cycles later.
        """
        if self.ranks:
            self.ranks.stopping = self.stopping
        return self.stopping and not self.ranks

    def _responses(
        self, prompt: list[int], end: int, progress: Progress | None, pictures: list[Picture]
    ) -> Responses:
        """Yield the answer's responses, after a rollback to a prefix of the prompt and a prefill up to `end`.

        Sets `turn`, and takes snapshots before the prefill and at `end`. If the caches already reach `end`, there is
        neither a separate prefill nor a snapshot at `end`.
        """
        common = shared(self.cache.tokens, prompt[:-1])
        reused = common if common == self.cache.offset else self._rewind(self._snapshots, common)
        turn = self.turn = Turn(len(prompt), reused)
        self._take_snapshot()
        first, rest, total = prompt[reused:end], prompt[max(end, reused) :], len(prompt) - reused
        self._intact = True  # the check does not write to the caches
        if self.options.get("max_tokens") == -1 and self.positions and len(prompt) >= self.positions:
            most = f"{self.positions - 1:,}, one less than the maximum of the model or max_context"
            earlier = len(self.messages) > len(self._system)
            remedy = "shorten the message" + (" or start a new conversation" if earlier else "")
            raise ValueError(f"the conversation has {len(prompt):,} tokens; allowed are at most {most}; {remedy}")
        self._check_memory(total)
        self._intact = False
        options: dict[str, Any] = {**self.options, "pictures": pictures}
        options["check_memory"] = False  # checked above for the whole prompt
        if options.get("max_tokens") == -1 and self.positions:
            options["max_tokens"] = self.positions - len(prompt)
        options |= {"prompt_cache": self.cache, "num_draft_tokens": self.num_draft_tokens}
        if not self.model.max_draft_tokens:
            options["num_draft_tokens"] = self._asked  # 0 would be plain decoding, without prompt lookup
        elif not self.num_draft_tokens:
            options["prompt_lookup"] = False  # disabled together with the heads
        if first:
            tic = time.perf_counter()
            options["prompt_progress_callback"] = partial(self._on_chunk, progress, 0, total)
            next(generate_step(first, self.model, **{**options, "max_tokens": 0}), None)
            self._take_snapshot()
            turn.stats.note_peak_memory()
            turn.prompt_time = time.perf_counter() - tic
        options["prompt_progress_callback"] = partial(self._on_chunk, progress, len(first), total)
        options["stats"] = turn.stats
        if (seed := self.options.get("seed")) is not None:
            options["seed"] = (seed + self.answers) % 2**63
        yield from stream_generate(self.model, self.tokenizer, rest, **options)

    def _check_memory(self, new: int) -> None:
        """Raise ValueError if `new` prompt tokens and an answer do not fit in memory or in the maximum context.

        With check_memory=False only the maximum context is checked.
        """
        options = self.options
        chunk = options.get("prefill_step_size") or default_chunk(self.model)
        ignore = not options.get("check_memory", True)
        limit = within(options.get("max_context"), self.cache.offset, new, options.get("max_tokens", 256))
        check_prompt(self.model, self.cache, new, limit, chunk, ignore=ignore)

    def _on_chunk(self, progress: Progress | None, before: int, total: int, done: int, part: int) -> None:
        """Raise Stopped if `stopping` is set and more chunks follow, else report progress.

        After the last chunk the caches are incomplete. before: tokens of the turn prefilled before this prefill.
        done, part: tokens of this prefill, those processed and all.
        """
        if done < part and (self.ranks.broadcast(self.stopping) if self.ranks else self.stopping):
            raise Stopped
        if progress:
            progress(before + done, total)

    def _rewind(self, snapshots: list[tuple[Mark, Quantizing | None]], maximum: int) -> int:
        """Roll back to the last snapshot of at most `maximum` tokens; return the new length.

        Without one, or if the target's caches cannot return to one, start over with empty caches: 0. `snapshots`
        replace the session's, without later ones and those from before the caches were quantized.
        """
        due = self.cache.quantizing  # a snapshot from before the caches were quantized does not fit them
        self._snapshots = [s for s in snapshots if s[0].length <= maximum and s[1] is due]
        if not self._snapshots or not self.cache.rewinds:
            self._start_over()
            return 0
        last, _ = self._snapshots[-1]
        self.cache.rewind(last)
        return last.length

    def _take_snapshot(self) -> None:
        """Store a snapshot at the current position, unless the last one is there or the caches are empty.

        The last KEPT_SNAPSHOTS remain.
        """
        here = self.cache.offset
        if here and not (self._snapshots and self._snapshots[-1][0].length == here):
            self._snapshots.append((self.cache.snapshot(), self.cache.quantizing))
            del self._snapshots[:-KEPT_SNAPSHOTS]

    def _tokens(self, messages: list[dict]) -> tuple[list[int], int]:
        """Return the prompt's tokens, and the index at which its generation prompt starts, at most the last index.

        Raises ValueError if the chat template refuses the messages or the prompt has no token.
        """
        prompt = self._encode(messages, answering=True)
        if not prompt:
            raise ValueError("the prompt is empty: the chat template, if any, renders nothing for this conversation")
        return prompt, shared(self._encode(messages, answering=False), prompt[:-1])

    def _encode(self, messages: list[dict], *, answering: bool) -> list[int]:
        if not self.tokenizer.has_chat_template and not pictures_of(messages):
            return self.tokenizer.encode(_running_text(messages))
        options = {**self.template_config, "add_generation_prompt": answering}
        return encode_messages(self.tokenizer, messages, options, self.model.vision)


def _running_text(messages: list[dict]) -> str:
    """Join a conversation's messages without a template, each message of the user on a new line."""
    text = ""
    for message in messages:
        new_line = message["role"] == "user" and text and not text.endswith("\n")
        text += ("\n" if new_line else "") + message["content"]
    return text
