"""Speak OpenAI's completions of plain text: `POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from .answer import Part, TextPart, TokenLogprob, logprobs_of, text_of
from .chat import check_format
from .exchange import Answer, Completion
from .fields import MOST_CHOICES, MOST_TOP, Door, Refused, integer, stops
from .job import Begun, End
from .prompts import Prompt, encode_text
from .sampling_fields import asks_for, most_tokens


class CompletionExchange(Completion):
    """One request for completions of a prompt, or of several."""

    api, prefix, kinds = "completions", "cmpl-", ("text_completion", "text_completion")

    def __init__(self, body: dict[str, Any], door: Door):
        super().__init__(body, door)
        check_format(body.get("response_format"), "response_format")
        if (integer(body, "best_of", 1, MOST_CHOICES) or self.choices) != self.choices:
            raise Refused("best_of: allowed is n", param="best_of")
        prompts = _prompts(body.get("prompt"), door)
        if len(prompts) * self.choices > MOST_CHOICES:
            raise Refused(f"prompt: allowed are {MOST_CHOICES} choices of all prompts together", param="prompt")
        more: dict[str, Any] = {"most": most_tokens(body, "max_tokens", "n_predict"), "stops": stops(body, "stop")}
        more |= {"logprobs": integer(body, "logprobs", 0, MOST_TOP), "choices": self.choices}
        self.asks = [ask for prompt in prompts for ask in asks_for(door, prompt, body, **more)]

    def begin(self, begun: Begun) -> Iterable[str]:
        return ()

    def part(self, choice: int, part: Part) -> Iterable[str]:
        assert isinstance(part, TextPart)
        yield self.chunk(_choice(choice, part.text, part.logprobs or None))

    def finish(self, choice: int, end: End) -> Iterable[str]:
        self.ends.append(end)
        yield self.chunk(_choice(choice, "", None, end.reason))

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        told = None if self.asks[index].logprobs is None else logprobs_of(answer.parts)
        return _choice(index, text_of(answer.parts), told, answer.end.reason)


def _choice(
    index: int, said: str, tokens: Sequence[TokenLogprob] | None, reason: str | None = None
) -> dict[str, Any]:
    told = None if tokens is None else _logprobs(tokens)
    return {"index": index, "text": said, "logprobs": told, "finish_reason": reason}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Write log probabilities in the form that this API has of its own."""
    texts = [each.token[0] for each in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [each.token[2] for each in tokens],
        "top_logprobs": [{token: logprob for token, _, logprob in each.top} for each in tokens],
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
    }


def _prompts(given: Any, door: Door) -> list[Prompt]:
    """Read a text, token ids, or a list of either."""
    if isinstance(given, list) and given and not all(type(each) is int for each in given):
        return [_prompt(each, door) for each in given]
    return [_prompt(given, door)]


def _prompt(given: Any, door: Door) -> Prompt:
    if isinstance(given, str):
        return encode_text(door.tokenizer, given)
    most = len(door.tokenizer)
    if isinstance(given, list) and given and all(type(token) is int and 0 <= token < most for token in given):
        return Prompt(given)
    raise Refused(f"prompt={repr(given)[:80]}: allowed are a text, token ids below {most}, or a list", param="prompt")
