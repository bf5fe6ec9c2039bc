"""Read the sampling fields of a request, and create the engine's request for each choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..generate import encoded
from .fields import ModelInfo, Refused, boolean, check_characters, field_of, integer, number, shown, words
from .job import DecodeRequest
from .prompts import EncodedPrompt, TooLong, check_length
from .token_rules import TokenRules, bad_words_of

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
CONTEXTS = ("repetition_context_size", "presence_context_size", "frequency_context_size")
ALIASES = {
    "repetition_penalty": "repeat_penalty",
    "repetition_context_size": "repeat_last_n",
    "min_tokens_to_keep": "min_keep",
    "max_tokens": "n_predict",
}
LARGE = 2**31
MAX_XTC = 0.5  # above this threshold XTC removes no token, because at most one exceeds it


def decode_requests(
    info: ModelInfo, prompt: EncodedPrompt, body: dict[str, Any], *, most: int | None, choices: int = 1, **more: Any
) -> list[DecodeRequest]:
    """Return one request for each of `choices`, with consecutive seeds; options of sampling are read from the body.

    most: maximum number of tokens, reduced to what fits; -1: what fits, None: the default. more: other fields of
    `DecodeRequest`.
    Raises Refused for invalid fields, an empty prompt, and one that leaves no room for a token.
    """
    _check_aliases(body)
    room = info.positions - len(prompt.tokens)
    if not prompt.tokens:
        raise Refused("the prompt is empty", param="prompt")
    if room < 1:
        raise _too_long(f"{len(prompt.tokens)} tokens", info, body)
    rules = _rules(body, info, most)
    if most is None and info.max_tokens is not None:
        most = max(info.max_tokens, rules.min_tokens)
    more["max_tokens"] = room if most is None or most == -1 else min(most, room)
    more |= {"penalties": _penalties(body, info), "rules": rules, "adapter": info.adapter_of(body)}
    sampling = _sampling(body, info)
    seeds = ((sampling["seed"] + i) % 2**63 for i in range(choices))
    more |= {"turns": prompt.turns, "pictures": prompt.pictures}
    return [DecodeRequest(prompt.tokens, sampling={**sampling, "seed": seed}, **more) for seed in seeds]


def text_prompt(info: ModelInfo, text: str, body: dict[str, Any]) -> EncodedPrompt:
    """Return the tokens of a text without a template; raises Refused if it is too long for the context."""
    check_characters(text, "prompt")
    with refusing_long(info, body):
        check_length(info.tokenizer, [text], info.positions)
    return EncodedPrompt(encoded(info.tokenizer, text))


@contextmanager
def refusing_long(info: ModelInfo, body: dict[str, Any]) -> Iterator[None]:
    """Raise Refused, as for a prompt that leaves no room for a token, for a TooLong of the block."""
    try:
        yield
    except TooLong as e:
        raise _too_long(str(e), info, body) from None


def _too_long(numbers: str, info: ModelInfo, body: dict[str, Any]) -> Refused:
    param = next((name for name in ("messages", "input", "prompt") if name in body), None)  # None: Ollama's
    message = f"prompt is too long: {numbers} > {info.positions - 1} maximum"
    return Refused(message, code="context_length_exceeded", param=param)


def most_tokens(body: dict[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is present: a maximum number of tokens, or -1 for no limit; else None.

    n_predict is the last of them in every API. Raises Refused if any of them is invalid.
    """
    allowed = "an integer of 1 or more, or -1 for no limit"
    found = [
        field_of(body, name, allowed, lambda v: type(v) is int and (v == -1 or 1 <= v < LARGE))
        for name in (*names, "n_predict")
    ]
    return next((each for each in found if each is not None), None)


def _check_aliases(body: dict[str, Any]) -> None:
    """Raise Refused if a field and another name of it, in ALIASES, contradict."""
    for name, alias in ALIASES.items():
        if (value := body.get(alias)) is not None and body.get(name) not in (None, value):
            raise Refused(f"{alias}={shown(value)}: contradicts {name}; send one", param=alias)


def _name_in(body: dict[str, Any], name: str) -> str:
    """Return the name, itself or of ALIASES, by which a body has a field."""
    return ALIASES[name] if body.get(name) is None and body.get(ALIASES[name]) is not None else name


def _sampling(body: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Return sampling options of `stream_generate`, each the request's or else the default.

    Options with neither are absent, except a random seed (also for -1), top_k 0 (off) and min_tokens_to_keep 1. An
    xtc_threshold above MAX_XTC switches XTC off. Raises Refused for an invalid field.
    """
    given = {
        "temp": number(body, "temperature", 0, 100),
        "top_p": number(body, "top_p", 0, 1),
        "top_k": integer(body, "top_k", -1, LARGE),
        "min_p": number(body, "min_p", 0, 1),
        "min_tokens_to_keep": integer(body, _name_in(body, "min_tokens_to_keep"), 0, LARGE),
        "xtc_probability": number(body, "xtc_probability", 0, 1),
        "xtc_threshold": number(body, "xtc_threshold", 0, 1),
        "seed": integer(body, "seed", -(2**63), 2**63 - 1),
    }
    found = {**info.defaults, **{name: value for name, value in given.items() if value is not None}}
    found["top_k"] = max(0, found.get("top_k") or 0)
    found["min_tokens_to_keep"] = max(1, found.get("min_tokens_to_keep") or 0)
    if found.get("xtc_threshold", 0) > MAX_XTC:
        found |= {"xtc_probability": 0.0, "xtc_threshold": MAX_XTC}
    seed = found.get("seed")
    found["seed"] = info.seeds() if seed in (None, -1) else seed % 2**63
    return {name: value for name, value in found.items() if name not in PENALTIES}


def _penalties(body: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Return penalties and bias of `LogitRules` that have an effect, the request's or the default.

    Context sizes are only the request's: 0 removes its penalty, -1 becomes LARGE.
    Raises Refused for an invalid field.
    """
    found = {
        "repetition_penalty": number(body, _name_in(body, "repetition_penalty"), 0, 100),
        "presence_penalty": number(body, "presence_penalty", -2, 2),
        "frequency_penalty": number(body, "frequency_penalty", -2, 2),
        "logit_bias": _bias(body, len(info.tokenizer)),
    }
    found = {name: info.defaults.get(name) if value is None else value for name, value in found.items()}
    found = {name: value for name, value in found.items() if value}
    if found.get("repetition_penalty") == 1:
        del found["repetition_penalty"]
    for name in CONTEXTS:
        given = _name_in(body, name) if name in ALIASES else name
        penalty, size = name.replace("context_size", "penalty"), integer(body, given, -1, LARGE)
        if size == 0:
            found.pop(penalty, None)
        elif size is not None and penalty in found:
            found[name] = LARGE if size == -1 else size
    return found


def _bias(body: dict[str, Any], most: int) -> dict[int, float] | None:
    allowed = f"an object of token ids from 0 to {most - 1} with values from -100 to 100"
    given = field_of(body, "logit_bias", allowed, lambda v: _are_biases(v, most))
    return given if given is None else {int(token): float(bias) for token, bias in given.items()}


def _are_biases(value: Any, most: int) -> bool:
    if not isinstance(value, dict) or len(value) > most:
        return False
    ids = [int(token) for token in value if len(token) < 20 and token.isascii() and token.isdigit()]
    few = len(ids) == len(value) == len({*ids}) and all(token < most for token in ids)
    return few and all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values())


def _rules(body: dict[str, Any], info: ModelInfo, most: int | None) -> TokenRules:
    least = integer(body, "min_tokens", -1, LARGE) or 0
    if most is not None and 0 < most < least:
        raise Refused(f"min_tokens={least}: allowed is at most max_tokens, {most}", param="min_tokens")
    if bad := words(body, "bad_words"):
        bad_words_of(info.tokenizer, bad)  # here, not on the thread that decodes
    return TokenRules(
        min_tokens=max(0, least),
        ignore_eos=boolean(body, "ignore_eos"),
        stop_tokens=_token_ids(body, "stop_token_ids", len(info.tokenizer)),
        bad_words=bad,
        allowed=_token_ids(body, "allowed_token_ids", len(info.tokenizer)),
    )


def _token_ids(body: dict[str, Any], name: str, most: int) -> tuple[int, ...]:
    """Return the token ids of a list field, without duplicates, () if it is missing.

    Raises Refused unless it is a list of at most `most` integers from 0 to most - 1.
    """
    allowed = f"a list of up to {most} token ids, each below {most}"
    given = field_of(body, name, allowed, lambda v: _are_tokens(v, most))
    return tuple(dict.fromkeys(given or ()))


def _are_tokens(value: Any, most: int) -> bool:
    few = isinstance(value, list) and len(value) <= most
    return few and all(type(each) is int and 0 <= each < most for each in value)
