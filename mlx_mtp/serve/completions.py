"""Speak OpenAI's completions of plain text: `POST /v1/completions`."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from .answer import Part, Said, TokenLogprob
from .exchange import Answer, data, new_id, now, openai_error, usage
from .fields import MOST_CHOICES, MOST_TOP, Door, Refused, boolean, integer, refuse, stops, text
from .job import Ask, Begun, End, Failed
from .prompts import Prompt, encode_text


class CompletionExchange:
    """One request for completions of a prompt, or of several. Raises Refused."""

    keep_alive = ": keep-alive\n\n"

    def __init__(self, body: dict[str, Any], door: Door):
        self.model, self.stream = door.called(body), boolean(body, "stream")
        refuse(body, "suffix", "echo")
        choices = integer(body, "n", 1, MOST_CHOICES) or 1
        if (integer(body, "best_of", 1, MOST_CHOICES) or choices) != choices:
            raise Refused("best_of: allowed is n", param="best_of")
        prompts = _prompts(body, door)
        if len(prompts) * choices > MOST_CHOICES:
            raise Refused(f"prompt: allowed are {MOST_CHOICES} choices of all prompts together", param="prompt")
        most, given = integer(body, "max_tokens", 1, 2**31), stops(body, "stop")
        logprobs = integer(body, "logprobs", 0, MOST_TOP)
        self.asks: list[Ask] = []
        for prompt in prompts:
            ask = door.ask(prompt, body, most, stops=given, logprobs=logprobs)
            seed = ask.sampling["seed"]
            for i in range(choices):
                self.asks.append(replace(ask, sampling={**ask.sampling, "seed": (seed + i) % 2**63}))
        self._prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        options = body.get("stream_options") or {}
        self._counts = isinstance(options, dict) and bool(options.get("include_usage"))
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": self.model}
        self._ends: list[End] = []

    def begin(self, begun: Begun) -> Iterable[str]:
        return ()

    def part(self, choice: int, part: Part) -> Iterable[str]:
        assert isinstance(part, Said)
        yield self._chunk(choice, part.text, _logprobs(part.logprobs) if part.logprobs else None)

    def finish(self, choice: int, end: End) -> Iterable[str]:
        self._ends.append(end)
        yield self._chunk(choice, "", None, end.reason)

    def close(self) -> Iterable[str]:
        if self._counts:
            yield data({**self._head, "choices": [], "usage": usage(self._ends, self._prompt_tokens)})
        yield data("[DONE]")

    def failed(self, failed: Failed) -> str:
        return data(openai_error(failed.status, failed.message))

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(answers):
            every = tuple(each for part in answer.parts if isinstance(part, Said) for each in part.logprobs)
            told = _logprobs(every) if self.asks[i].logprobs is not None else None
            choices.append({"index": i, "text": answer.text(), "logprobs": told, "finish_reason": answer.over.reason})
        counts = usage([answer.over for answer in answers], self._prompt_tokens)
        return {**self._head, "choices": choices, "usage": counts}

    def _chunk(self, choice: int, said: str, logprobs: Any, reason: str | None = None) -> str:
        choices = [{"index": choice, "text": said, "logprobs": logprobs, "finish_reason": reason}]
        return data({**self._head, "choices": choices})


def _prompts(body: dict[str, Any], door: Door) -> list[Prompt]:
    """Read a text, token ids, or a list of either."""
    given = body.get("prompt")
    if isinstance(given, list) and given and not all(type(each) is int for each in given):
        return [_prompt(each, door) for each in given]
    return [_prompt(given, door)]


def _prompt(given: Any, door: Door) -> Prompt:
    if isinstance(given, str):
        return encode_text(door.tokenizer, text({"prompt": given}, "prompt") or "")
    most = len(door.tokenizer)
    if isinstance(given, list) and given and all(type(token) is int and 0 <= token < most for token in given):
        return Prompt(given)
    raise Refused(f"prompt={repr(given)[:80]}: allowed are a text, token ids below {most}, or a list", param="prompt")


def _logprobs(each: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """Write log probabilities in the form that this API has of its own."""
    tokens = [one.token[0] for one in each]
    return {
        "tokens": tokens,
        "token_logprobs": [one.token[2] for one in each],
        "top_logprobs": [{token: logprob for token, _, logprob in one.top} for one in each],
        "text_offset": [0, *accumulate(map(len, tokens))][:-1],
    }
