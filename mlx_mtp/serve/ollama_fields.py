"""Convert request fields of Ollama's API to those of OpenAI's chat completions."""

import re
from typing import Any

from .field_sizes import check_size
from .field_table import unknown_names
from .fields import Refused, field_of, fields_of, items, shown, text
from .forms import Message
from .output_format import GUIDED
from .sampling_fields import LARGE

FIELDS = ("model", "format", "options", "stream", "think", "keep_alive", *GUIDED, "structured_outputs")
FIELDS += ("guided_whitespace_pattern", "template", "suffix", "truncate", "shift")  # the last two are ignored
CHAT, GENERATE = (*FIELDS, "messages", "tools"), (*FIELDS, "prompt", "system", "images", "raw", "context")
REFUSED = {
    "template": "the model's own chat template is used; leave it out",
    "suffix": "text is not inserted before a suffix; leave it out",
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n")
SAMPLING += ("presence_penalty", "frequency_penalty", "typical_p", "tfs_z", "num_ctx", "num_keep")
SAMPLING += ("mirostat", "mirostat_tau", "mirostat_eta")
SYSTEM = ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "vocab_only", "use_mmap", "use_mlock")
SYSTEM += ("f16_kv", "logits_all", "penalize_newline", "draft_num_predict")  # of another engine; ignored
OWN = ("num_predict",)  # read by `most_predicted`
NAMES = {"num_keep": "n_keep"}
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|-?\d+(?:\.\d+)?")
PIECE = re.compile(r"(\d+(?:\.\d+)?)([a-zµ]+)")


def as_openai(body: dict[str, Any], known: tuple[str, ...], warnings: list[str]) -> dict[str, Any]:
    """Return fields of chat completions for a body of `/api/chat` or `/api/generate`.

    These are the model, the switch of reasoning, stream (by default true) and the options in SAMPLING; of their
    values only the size is checked. Messages, prompt, tools and format are not converted. known: CHAT or GENERATE.
    warnings: appended to, for unknown fields and options, and those without effect. Raises Refused for a field in
    REFUSED that is not empty, for `options` that is no object, and as `check_size`.
    """
    for name, reason in REFUSED.items():
        if body.get(name):
            raise Refused(f"{name}: {reason}", param=name)
    for name in known:
        if name not in ("context", *REFUSED):
            check_size(name, body.get(name))
    options = fields_of(body, "options")
    warnings += unknown_names("field", [name for name in body if name not in known])
    warnings += unknown_names("option", [name for name in options if name not in (*OWN, *SAMPLING, *SYSTEM)])
    if "raw" in known and body.get("raw"):
        warnings += [f"{name} has no effect with raw" for name in ("system", "think") if body.get(name)]
    if "context" in known and body.get("context"):
        warnings.append("context has no effect: send the messages of the conversation to /api/chat")
    found = {NAMES.get(name, name): options[name] for name in SAMPLING if options.get(name) is not None}
    found |= {name: body[name] for name in ("model", "think") if body.get(name) is not None}
    return {**found, "stream": body.get("stream") is None or body["stream"]}


def most_predicted(body: dict[str, Any]) -> int | None:
    """Return the maximum number of tokens, options.num_predict; None without it, -1 (no limit) for -1 and -2.

    Raises Refused for another value that is no integer from 1 to LARGE - 1.
    """
    allowed = f"an integer from 1 to {LARGE - 1}, or -1 for no limit"
    fits = _is_count
    found = field_of(fields_of(body, "options"), "num_predict", allowed, fits)
    return -1 if found == -2 else found


def _is_count(value: Any) -> bool:
    return type(value) is int and (value in (-1, -2) or 1 <= value < LARGE)


def idle_seconds(body: dict[str, Any]) -> float | None:
    """Return the seconds of `keep_alive`; infinite if it is negative, None if it is missing, null or "".

    It is a number of seconds, or a text such as "90", "5m" or "1h30m". Raises Refused for any other value.
    """
    value = body.get("keep_alive")
    if value is None or value == "":
        return None
    if isinstance(value, str) and DURATION.fullmatch(value):
        pieces = PIECE.findall(value)
        size = sum(float(number) * UNITS[unit] for number, unit in pieces) if pieces else abs(float(value))
        value = -size if value.startswith("-") else size
    if isinstance(value, bool) or not isinstance(value, int | float) or value >= LARGE:
        allowed = f"seconds below {LARGE}, or a text such as 5m"
        raise Refused(f"keep_alive={shown(value)}: allowed are {allowed}", param="keep_alive")
    return float("inf") if value < 0 else float(value)


def chat_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of `/api/chat` in OpenAI's form, as `messages_of` receives them. Raises Refused.

    Tool calls without an id get one. A tool result without an id gets that of the first call that has no result yet
    in the latest message with calls; if the result names its tool, of the first call of this tool.
    """
    found: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []
    for given in items(body, "messages"):
        message = {name: given[name] for name in ("role", "content", "tool_call_id") if given.get(name) is not None}
        if thought := text(given, "thinking"):
            message["reasoning_content"] = thought
        if given.get("images"):
            message["content"] = _with_pictures(text(given, "content"), given)
        if calls := items(given, "tool_calls"):
            number = sum(len(each.get("tool_calls", ())) for each in found)
            calls = [{"id": f"call_{number + i}", **call} for i, call in enumerate(calls)]
            message["tool_calls"], pending = calls, [*calls]
        if given.get("role") == "tool":
            _link(message, text(given, "tool_name") or text(given, "name"), pending)
        found.append(message)
    return found


def _link(result: Message, name: str, pending: list[dict[str, Any]]) -> None:
    """Add `name`, unless "", to a tool result and, if the result has no id, that of its call, if one is pending.

    The call is the first of `pending` that has the result's id or, if the result has none, the name ("": any); it is
    removed from `pending`.
    """
    if name:
        result["name"] = name
    given = result.get("tool_call_id")
    fits = [call for call in pending if given in (None, call["id"]) and (given or name in ("", _name(call)))]
    if fits:
        pending.remove(fits[0])
        result.setdefault("tool_call_id", fits[0]["id"])


def _name(call: dict[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def generate_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of `/api/generate` in OpenAI's form: `system`, unless it is empty, and `prompt`.

    The user message of the prompt has the pictures in `images`. Raises Refused for fields of another type.
    """
    system, content = text(body, "system"), _with_pictures(text(body, "prompt"), body)
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]


def _with_pictures(content: str, body: dict[str, Any]) -> Any:
    """Return the pictures in `images`, in Base64, followed by a text, as a list of parts; without pictures the text.

    The parts have the form that `RequestPictures.add` receives; an empty text is left out. Raises Refused if `images`
    is no list of texts.
    """
    allowed = "a list of pictures in Base64"
    pictures = field_of(body, "images", allowed, lambda v: isinstance(v, list) and all(isinstance(p, str) for p in v))
    if not pictures:
        return content
    parts = [{"type": "image", "source": {"type": "base64", "data": picture}} for picture in pictures]
    return [*parts, {"type": "text", "text": content}] if content else parts
