"""Hold a conversation: its messages, and the caches that already hold most of the next prompt.

The whole conversation is rendered and tokenized anew for every turn, so the text never depends on what was
cached. The caches continue where their tokens are a prefix of it; where a chat template has rewritten an earlier
answer (or a retokenized one differs) they go back to a snapshot taken before the difference.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .cache.from_mlx_lm import from_mlx_lm
from .cache.mark import Mark, Quantizing
from .cache.prompt_cache import PromptCache, make_prompt_cache
from .cache.prompt_prefix import render, shared
from .decoding.buffer_count import KEPT_SNAPSHOTS
from .decoding.memory_needs import check_prompt, within
from .decoding.options import cache_options, default_draft_tokens, default_step
from .decoding.stats import Stats
from .generate import GenerationResponse, generate_step, stream_generate
from .layers.target import Target
from .machine.stream import in_turns
from .tuning.idle_trials import IdleTrials

Progress = Callable[[int, int], None]
Responses = Generator[GenerationResponse, None, None]


class Stopped(Exception):
    """`ChatSession.stopping` was set while the prompt was being read."""


@dataclass
class Turn:
    """What one turn cost.

    prompt_tokens: the whole conversation up to the answer; reused: how many of them the caches already held.
    read_time:     seconds spent on the prompt before its last few tokens, which `stats` knows about.
    """

    prompt_tokens: int
    reused: int = 0
    read_time: float = 0.0
    stats: Stats = field(default_factory=Stats)

    @property
    def prompt_tps(self) -> float:
        """New prompt tokens per second, until the first token of the answer had arrived."""
        new, seconds = self.prompt_tokens - self.reused, self.read_time + self.stats.prefill_time
        return new / seconds if seconds else 0.0


class ChatSession:
    """Messages and caches of a conversation.

    cache:    the tokens it holds are in `cache.tokens`, whatever stopped a turn.
    stopping: set it (from a signal handler, another thread) to end the turn under way; it is cleared at the end.
    num_draft_tokens: may be changed between turns.
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
        """options: those of `stream_generate`; the first message begins with what a `prompt_cache` holds of it.

        Raises ValueError for an option out of range.
        """
        self.model, self.tokenizer, self.template_config = model, tokenizer, template_config or {}
        self.ranks = model.ranks
        generate_step([0], model, **options).close()  # checks the options, computes nothing
        k = options.pop("num_draft_tokens", None)
        self.num_draft_tokens = default_draft_tokens(model) if k is None else k
        layout = cache_options(options)
        self._given, self._prefix_text = from_mlx_lm(model, options.pop("prompt_cache", None)), ""
        if self._given is not None:
            system_prompt = self._continue(self._given, system_prompt)
            self._begun = (self._given.snapshot(), self._given.quantizing)
        self._blank = self._given.like_new() if self._given else make_prompt_cache(model, **layout)
        self._at_rest = True
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self.options = options
        self.stopping = False
        self.answers = 0
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation. Answers are counted on, so that a seed's draws do not repeat."""
        self.messages, self.turn = self._system, Turn(0)
        if self._given is not None and self._at_rest:
            self.cache = self._given
            self._rewind([self._begun], self._begun[0].length)
        else:
            self._start_over()
        self._at_rest = True

    def resume(self, messages: list[dict[str, str]], answers: int) -> None:
        """Go on with these messages as the session would that gave so many answers, on which a seed's draws depend.

        messages: {"role", "content"}; a first one of role "system" is the system prompt from now on. Raises
        ValueError, and changes nothing, where the chat template does.
        """
        self._tokens([*messages, {"role": "user", "content": "?"}])
        self._system = [message for message in messages[:1] if message["role"] == "system"]
        self.messages, self.answers, self.turn = messages, answers, Turn(0)

    @property
    def system_prompt(self) -> str | None:
        """The system prompt; may be set at any time, for the answers that follow. Raises as `resume` does."""
        return self._system[0]["content"] if self._system else None

    @system_prompt.setter
    def system_prompt(self, text: str) -> None:
        self.resume([{"role": "system", "content": text}, *self.messages[len(self._system) :]], self.answers)

    def _start_over(self) -> None:
        """Begin with empty caches."""
        self._snapshots: list[tuple[Mark, Quantizing | None]] = []
        self.cache: PromptCache = self._blank.like_new()
        self._given = None

    def _continue(self, cache: PromptCache, system_prompt: str | None) -> str | None:
        """Take over what a given cache holds; return the system prompt."""
        if len(cache.heads) < len(self.model.head_windows()):
            self.num_draft_tokens = min(self.num_draft_tokens, len(cache.heads))
        prefix = cache.prefix
        if prefix is None and not cache.offset:
            return system_prompt
        if prefix is None or (self.tokenizer.has_chat_template and not prefix.template):
            raise ValueError("prompt_cache: does not hold the beginning of a conversation")
        prefix.check(system_prompt=system_prompt, template_config=self.template_config)
        self._prefix_text, self.template_config = prefix.prompt, prefix.template_config
        return prefix.system_prompt

    def idle(self) -> IdleTrials:
        """Try kernels, while this is entered, that the load left untried: for whoever waits for the next message."""
        return IdleTrials(self.model)

    def ask(self, text: str, progress: Progress | None = None) -> Responses:
        """Send a message and yield the answer's responses; `turn` has the counts of the whole prompt.

        Closing the iterator or setting `stopping` ends the answer, which stays in the conversation as far as it
        was yielded; where nothing was, the message is left out. Raises ValueError where the template does.
        """
        return in_turns(self._answer(text, progress))

    def _answer(self, text: str, progress: Progress | None) -> Responses:
        """Make the answer of `ask`."""
        text = text if len(self.messages) > len(self._system) else self._prefix_text + text
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, end = self._tokens(messages)
        if not self._at_rest:  # an exception ended the last turn, perhaps halfway through a write
            self._start_over()
        self._at_rest = False
        answer: list[str] = []
        try:
            with suppress(Stopped, GeneratorExit), closing(self._responses(prompt, end, progress)) as responses:
                for response in responses:
                    answer.append(response.text)
                    yield response
                    if self._ends():
                        break
            self._at_rest = True
        finally:
            self.stopping = False
            self._ends()
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
                self.answers += 1

    def _ends(self) -> bool:
        """Tell whether the answer is to be broken off here; ranks end it together, a cycle or two later."""
        if self.ranks:
            self.ranks.stopping = self.stopping
        return self.stopping and not self.ranks

    def _responses(self, prompt: list[int], end: int, progress: Progress | None) -> Responses:
        """Read what is new of the prompt, with a snapshot at `end`, and answer."""
        common = shared(self.cache.tokens, prompt[:-1])
        reused = common if common == self.cache.offset else self._rewind(self._snapshots, common)
        turn = self.turn = Turn(len(prompt), reused)
        self._remember()
        first, rest, total = prompt[reused:end], prompt[max(end, reused) :], len(prompt) - reused
        self._at_rest = True  # should this raise
        self._check(total)
        self._at_rest = False
        options: dict[str, Any] = {**self.options, "check_memory": False}  # of each part of the prompt
        options |= {"prompt_cache": self.cache, "num_draft_tokens": self.num_draft_tokens}
        if not self.num_draft_tokens and self.model.max_draft_tokens:
            options["prompt_lookup"] = False  # switched off with the heads
        if first:
            tic = time.perf_counter()
            options["prompt_progress_callback"] = partial(self._read, progress, 0, total)
            next(generate_step(first, self.model, **{**options, "max_tokens": 0}), None)
            self._remember()
            turn.stats.notes_memory()
            turn.read_time = time.perf_counter() - tic
        options["prompt_progress_callback"] = partial(self._read, progress, len(first), total)
        options["stats"] = turn.stats
        if (seed := self.options.get("seed")) is not None:
            options["seed"] = (seed + self.answers) % 2**63
        yield from stream_generate(self.model, self.tokenizer, rest, **options)

    def _check(self, new: int) -> None:
        """Raise ValueError where `new` tokens and an answer do not fit."""
        options = self.options
        step = options.get("prefill_step_size") or default_step(self.model)
        ignore = not options.get("check_memory", True)
        limit = within(options.get("max_context"), self.cache.offset, new, options.get("max_tokens", 256))
        check_prompt(self.model, self.cache, new, limit, step, ignore=ignore)

    def _read(self, progress: Progress | None, before: int, total: int, done: int, part: int) -> None:
        """Stop or go on between two chunks, where caches are whole (they are not yet after a part's last one)."""
        if done < part and (self.ranks.told(self.stopping) if self.ranks else self.stopping):
            raise Stopped
        if progress:
            progress(before + done, total)

    def _rewind(self, snapshots: list[tuple[Mark, Quantizing | None]], most: int) -> int:
        """Take the caches back to the last of the snapshots with at most so many tokens; return its length."""
        due = self.cache.quantizing  # a snapshot from before the caches were quantized does not fit them
        self._snapshots = [s for s in snapshots if s[0].length <= most and s[1] is due]
        if not self._snapshots or not self.cache.rewinds:
            self._start_over()
            return 0
        last, _ = self._snapshots[-1]
        self.cache.rewind(last)
        return last.length

    def _remember(self) -> None:
        """Take a snapshot here, unless there is one."""
        here = self.cache.offset
        if here and not (self._snapshots and self._snapshots[-1][0].length == here):
            self._snapshots.append((self.cache.snapshot(), self.cache.quantizing))
            del self._snapshots[:-KEPT_SNAPSHOTS]

    def _tokens(self, messages: list[dict]) -> tuple[list[int], int]:
        """Encode the prompt; return also where its generation prompt begins, which is before its last token."""
        prompt = self._encode(messages, answering=True)
        if not prompt:
            raise ValueError("the prompt is empty: the chat template makes nothing of this conversation")
        return prompt, shared(self._encode(messages, answering=False), prompt[:-1])

    def _encode(self, messages: list[dict], *, answering: bool) -> list[int]:
        if not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(_running_text(messages))
        options = {**self.template_config, "add_generation_prompt": answering}
        return self.tokenizer.encode(render(self.tokenizer, messages, options), add_special_tokens=False)


def _running_text(messages: list[dict]) -> str:
    """Write a conversation without a template: the texts as they are, each message on a line of its own."""
    text = ""
    for message in messages:
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text
