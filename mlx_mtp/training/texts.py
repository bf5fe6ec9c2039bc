"""Tokenize training texts, given or in files, and write with the model the prompts and answers that are missing."""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from ..generate import batch_generate
from ..machine.errors import one_line

MARK = "\x02user\x02"  # a user's message that no template changes
WAVE = 32  # prompts or answers written in one batch
PROMPT_TOKENS = 100  # maximum tokens of a prompt that the model writes
GREEDY = 4  # all but one of this number of answers are greedy
LEAST = 16  # tokens of a document; shorter ones are skipped
OPENING_TOKENS = 16  # maximum tokens of a text that the model begins without a chat template
EMPTY = 8  # waves in a row without a new prompt, or of short texts, after which the model is given up


@dataclass(frozen=True)
class Text:
    """The tokens of a text or document. answer: index of the first token of the answer, whose drafts are measured.

    It is 0 for a text without a prompt, and the number of tokens for a prompt without an answer.
    """

    tokens: list[int]
    answer: int = 0


Given = str | list[int] | list[dict[str, str]] | Path


def given_texts(given: Iterable[Given], tokenizer: Any) -> Iterator[Text]:
    """Yield a Text for each string, list of token ids and list of messages, and those of each Path, by `read_file`.

    Strings and token ids are texts without a prompt; messages are a prompt, with its answer if the assistant's is the
    last one. ValueError as `read_file`, and for messages that are malformed or that the chat template refuses.
    """
    for number, each in enumerate(given, start=1):
        if isinstance(each, Path):
            yield from read_file(each, tokenizer)
        elif isinstance(each, str):
            yield Text(tokenizer.encode(each))
        elif each and isinstance(each[0], dict):
            with one_line(f"text {number}: expected messages that the chat template allows"):
                text = of_line({"messages": each}, tokenizer)
            yield text
        else:
            yield Text(list(each))  # type: ignore[arg-type]


def answered(texts: Iterable[Text], model: Any, tokenizer: Any, length: int) -> Iterator[Text]:
    """Yield the texts, of which prompts without an answer get the model's, as in `answers`; the order changes.

    They are answered once there are WAVE of them, or at the end. length: maximum tokens of prompt and answer; prompts
    of length - 1 tokens or more are left out.
    """
    prompts, waves = list[list[int]](), count()
    for text in texts:
        if text.answer < len(text.tokens) or not text.tokens:
            yield text
            continue
        prompts.append(text.tokens)
        if len(prompts) == WAVE:
            yield from answers(model, tokenizer, prompts, length, next(waves))
            prompts = []
    yield from answers(model, tokenizer, prompts, length, next(waves))


def read_file(path: Path, tokenizer: Any) -> Iterator[Text]:
    """Yield the texts of a file: one for each line of *.jsonl that is not blank, else one, its whole content.

    A line is an object with "text", a text without a prompt; else with "prompt", and "completion" if there is an
    answer; else with "messages", whose last one is the answer if it is the assistant's. ValueError for other lines,
    for messages that the chat template refuses, and for a file that is not UTF-8; OSError if it cannot be read.
    """
    with one_line(f"{path}: not UTF-8 text", (UnicodeDecodeError,)):
        content = path.read_text("utf-8")
    if path.suffix != ".jsonl":
        yield Text(tokenizer.encode(content))
        return
    for number, line in enumerate(content.split("\n"), start=1):  # JSON may contain other line separators
        if line.strip():
            with one_line(f"{path}: line {number}: {LINE}"):  # a chat template raises errors of any type
                text = of_line(json.loads(line), tokenizer)
            yield text


LINE = "expected an object with text, messages, or prompt and completion"


def of_line(entry: dict[str, Any], tokenizer: Any) -> Text:
    """Return the Text of a line's object (see `read_file`); an answer ends with the tokenizer's end-of-text token.

    Other objects raise errors of any type.
    """
    if "text" in entry:
        return Text(tokenizer.encode(entry["text"]))
    if "prompt" in entry:
        messages = [{"role": "user", "content": entry["prompt"]}]
        if "completion" in entry:
            messages.append({"role": "assistant", "content": entry["completion"]})
    else:
        messages = entry["messages"]
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    prompt = chat_tokens(tokenizer, asked)
    if len(asked) == len(messages):
        return Text(prompt, len(prompt))
    answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    return Text([*prompt, *answer, tokenizer.eos_token_id], len(prompt))


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of messages in the chat template, with its generation prompt.

    Without a template they are those of the last message's content alone.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode(messages[-1]["content"])
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def own_texts(model: Any, tokenizer: Any, length: int, seed: int) -> Iterator[Text]:
    """Yield prompts of `own_prompts` with the model's answers, as in `answers`.

    They end where the prompts do, and after EMPTY * WAVE texts in a row of fewer than LEAST tokens. length: maximum
    tokens of prompt and answer. seed: as in `own_prompts` and `answers`. ValueError as in `own_prompts`.
    """
    short = 0
    for text in answers(model, tokenizer, own_prompts(model, tokenizer, length, seed), length, seed):
        yield text
        short = 0 if len(text.tokens) >= LEAST else short + 1
        if short == EMPTY * WAVE:
            return


def own_prompts(model: Any, tokenizer: Any, length: int, seed: int) -> Iterator[list[int]]:
    """Yield the tokens of prompts of at most length - 2 tokens that the model samples at temperature 1; all differ.

    A prompt is a user's message in the chat template; without a template, the first tokens of a text. seed: of the
    first wave; each later wave has the next one. The prompts end after EMPTY waves in a row without a new prompt;
    ValueError if there is none before, or as `user_prefix` or, without a template, `_openings`.
    """
    written = _messages if tokenizer.has_chat_template else _openings
    seen, empty = set[bytes](), 0
    for wave in count():
        mx.random.seed(seed + wave)  # the option `seed` would draw the same text for equal prompts
        before = len(seen)
        for prompt in written(model, tokenizer):
            key = array("q", prompt).tobytes()
            if len(prompt) + 1 < length and key not in seen:
                seen.add(key)
                yield prompt
        empty = 0 if len(seen) > before else empty + 1
        if empty == EMPTY:
            break
    if not seen:
        raise ValueError(f"the model writes only prompts of 0 or of over {length - 2} tokens; give texts or prompts")


def _messages(model: Any, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of a wave of prompts: a user's message that the model samples, in the chat template."""
    before, sampler = user_prefix(tokenizer), make_sampler(temp=1.0)
    written = batch_generate(model, tokenizer, [before] * WAVE, max_tokens=PROMPT_TOKENS, sampler=sampler)
    for text in written.texts:
        if content := text.strip():
            yield chat_tokens(tokenizer, [{"role": "user", "content": content}])


def _openings(model: Any, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the first tokens of a wave of texts that the model samples from the tokens of an empty text on.

    Where the tokenizer has no tokens for an empty text, its start-of-text or end-of-text token begins the texts;
    ValueError without these.
    """
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id
    before = tokenizer.encode("") or [token for token in ends if token is not None][:1]
    if not before:
        raise ValueError("the tokenizer has no chat template and no token that begins a text; give texts")
    options = {"max_tokens": OPENING_TOKENS, "sampler": make_sampler(temp=1.0), "return_token_ids": True}
    for tokens in batch_generate(model, tokenizer, [before] * WAVE, **options).token_ids or []:
        inside = [token for token in tokens if token not in tokenizer.eos_token_ids]
        if inside:
            yield [*before, *inside]


def user_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens of the chat template's text before a user's message.

    ValueError if the rendered template does not contain the message unchanged.
    """
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, found, _ = rendered.partition(MARK)
    if not found:
        raise ValueError("the chat template does not contain the user's message unchanged; give texts")
    return tokenizer.encode(before, add_special_tokens=False)


def answers(model: Any, tokenizer: Any, prompts: Iterable[list[int]], length: int, seed: int = 0) -> Iterator[Text]:
    """Yield each prompt with the model's answer: one in GREEDY sampled at temperature 0.8, the others greedy.

    Each WAVE of prompts is answered in two batches, the greedy answers first. length: maximum tokens of prompt and
    answer; prompts of length - 1 tokens or more are left out. seed: of the first wave's samples.
    """
    rest = iter(prompts)
    for wave in count():
        asked = list(islice(rest, WAVE))
        if not asked:
            return
        short = [prompt for prompt in asked if len(prompt) + 1 < length]
        mx.random.seed(seed + wave)
        drawn: dict[str, Any] = {"sampler": make_sampler(temp=0.8)}
        for group, options in (([p for i, p in enumerate(short) if i % GREEDY], {}), (short[::GREEDY], drawn)):
            if not group:
                continue
            limits = [length - len(prompt) for prompt in group]
            written = batch_generate(model, tokenizer, group, max_tokens=limits, return_token_ids=True, **options)
            for prompt, answer in zip(group, written.token_ids or [], strict=True):
                yield Text([*prompt, *answer], len(prompt))
