"""Find the special token with which a chat template ends an answer, where a checkpoint's files name another.

A fine-tune often keeps the base model's end of text in all its files, while its template ends each turn with its own.
"""

import copy
import re
from contextlib import suppress
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .chat_template import render
from .stored_template import default_template
from .template_limits import TemplateStopped
from .template_process import isolate

NEAR = 60  # characters of a template between the content of a message and the token behind it
USER, REASON, ANSWER, NEXT = ("turn-user", "turn-reason", "turn-answer", "turn-next")  # contents of messages


def add_end_of_turn(tokenizer: Any) -> None:
    """Add the token that ends answers to an mlx-lm tokenizer's stop tokens, unless one of them does.

    Without such a token, and if the template fails, nothing is added. The template runs in a process of its own.
    """
    template = default_template(getattr(tokenizer, "chat_template", None))
    ends = {end for end in tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids)) if end}
    written = {
        str(each) for each in tokenizer.added_tokens_decoder.values() if each.special and str(each) in template
    }
    written -= {*ends, tokenizer.bos_token}
    if written and not _follows_content(template, ends, written):
        isolated = TokenizerWrapper(copy.copy(tokenizer._tokenizer))
        isolate(isolated)
        with suppress(ValueError, TemplateStopped):
            if end := _end_of_turn(isolated, {*written, *ends}):
                tokenizer.add_eos_token(end)


def _follows_content(template: str, ends: set[str], others: set[str]) -> bool:
    """Return whether a template's text names one of `ends` next behind a content, so that it need not be rendered."""
    any_of = _any_of({*ends, *others})
    following = (any_of.search(template[each.end() : each.end() + NEAR]) for each in re.finditer("content", template))
    return any(found[0] in ends for found in following if found)


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(sorted(map(re.escape, tokens), key=len, reverse=True)))


def _end_of_turn(tokenizer: Any, special: set[str]) -> str | None:
    """Return the special token directly behind each answer, None if there is none; ValueError if the template fails.

    It has to follow the last answer as well as an earlier one, or it begins the next turn (GLM's <|user|>). It must
    neither begin the first message nor stand inside an answer, where it ends a part (gpt-oss's <|end|>).
    """
    any_of = _any_of(special)
    question, after = {"role": "user", "content": USER}, {"role": "user", "content": NEXT}
    answer = {"role": "assistant", "content": ANSWER}
    thoughtful = answer | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), REASON)
    last, earlier, inside = (
        render(tokenizer, messages, {})
        for messages in ([question, answer], [question, answer, after], [question, thoughtful])
    )
    found = {_behind(text, any_of) for text in (last, earlier)}
    first = any_of.search(last.partition(USER)[0].removeprefix(tokenizer.bos_token or ""))
    _, _, within = inside.partition(REASON)
    if len(found) > 1 or (first and first[0] in found) or {*any_of.findall(within.partition(ANSWER)[0])} & found:
        return None
    return found.pop()


def _behind(text: str, any_of: re.Pattern[str]) -> str | None:
    """Return the special token that follows the answer in a rendered text, after white space at most."""
    found = any_of.match(text.rpartition(ANSWER)[2].lstrip())
    return found[0] if found and ANSWER in text else None
