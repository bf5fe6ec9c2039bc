"""Serve OpenAI's completions API, for plain text without a chat template: `POST /v1/completions`."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from .answer import AnswerPart, TextPart, TokenLogprob, logprobs_of, text_of
from .api_request import Answer, ChoicesRequest
from .fields import MOST_CHOICES, MOST_TOP, ModelInfo, Refused, integer, shown, stops
from .job import Begun, End
from .output_format import output_of
from .prompts import EncodedPrompt
from .sampling_fields import decode_requests, most_tokens, text_prompt
from .structured import constraint_of


class CompletionRequest(ChoicesRequest):
    """A request for completions of one or several prompts."""

    api, prefix, kinds = "completions", "cmpl-", ("text_completion", "text_completion")

    def __init__(self, body: dict[str, Any], info: ModelInfo):
        super().__init__(body, info)
        if (integer(body, "best_of", 1, MOST_CHOICES) or self.choices) != self.choices:
            raise Refused("best_of: allowed is only the value of n", param="best_of")
        given = body.get("prompt")
        if not isinstance(given, list) or not given or all(type(each) is int for each in given):
            given = [given]  # one prompt, a text or token ids
        if len(given) * self.choices > MOST_CHOICES:
            raise Refused(f"prompt: allowed are at most {MOST_CHOICES} choices, n for each prompt", param="prompt")
        options: dict[str, Any] = {"most": most_tokens(body, "max_tokens"), "stops": stops(body, "stop")}
        options |= {"logprobs": integer(body, "logprobs", 0, MOST_TOP), "choices": self.choices}
        options["progress"] = self.shows_prefill
        if output := output_of(self.api, body):
            options["grammar"] = constraint_of(info, output)
        prompts = [_prompt(each, body, info) for each in given]
        self.requests = [request for prompt in prompts for request in decode_requests(info, prompt, body, **options)]

    def begin(self, begun: Begun) -> Iterable[str]:
        return ()

    def part(self, choice: int, part: AnswerPart) -> Iterable[str]:
        assert isinstance(part, TextPart)
        yield self.chunk(_choice(choice, part.text, part.logprobs or None))

    def finish(self, choice: int, end: End) -> Iterable[str]:
        self.ends.append(end)
        yield self.chunk(_choice(choice, "", None, end.reason))

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs = None if self.requests[index].logprobs is None else logprobs_of(answer.parts)
        return _choice(index, text_of(answer.parts), logprobs, answer.end.reason)


def _choice(
    index: int, text: str, tokens: Sequence[TokenLogprob] | None, reason: str | None = None
) -> dict[str, Any]:
    logprobs = None if tokens is None else _logprobs(tokens)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log probabilities in the form of `/v1/completions`, which differs from that of chat completions.

    text_offset: the start of each token's text, in characters from the first of these tokens.
    """
    texts = [each.token[0] for each in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [each.token[2] for each in tokens],
        "top_logprobs": [{token: logprob for token, _, logprob in each.top} for each in tokens],
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
    }


def _prompt(given: Any, body: dict[str, Any], info: ModelInfo) -> EncodedPrompt:
    """Return the tokens of a text or of a list of token ids; raises Refused for another value."""
    if isinstance(given, str):
        return text_prompt(info, given, body)
    most = len(info.tokenizer)
    if isinstance(given, list) and given and all(type(token) is int and 0 <= token < most for token in given):
        return EncodedPrompt(given)
    allowed = f"a text, a list of at least one token id from 0 to {most - 1}, or a list of these"
    raise Refused(f"prompt={shown(given)}: allowed are {allowed}", param="prompt")
