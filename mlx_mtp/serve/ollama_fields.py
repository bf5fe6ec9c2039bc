"""Convert request fields of Ollama's API to those of OpenAI's chat completions."""

import re
from typing import Any

from .chat_messages import message_of_chat
from .contents import Contents
from .fields import Refused, field_of, fields_of, text
from .forms import Message
from .places import Place
from .sampling_fields import LARGE

FIELDS = ("model", "messages", "prompt", "system", "tools", "format", "options", "stream", "think", "keep_alive")
FIELDS += ("images", "raw", "template", "suffix", "truncate", "shift", "context")  # the last three are ignored
REFUSED = {
    "template": "the model's own chat template is used; leave it out",
    "suffix": "text is not inserted before a suffix; leave it out",
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n")
SAMPLING += ("presence_penalty", "frequency_penalty", "typical_p", "tfs_z", "num_ctx", "num_keep")
SAMPLING += ("mirostat", "mirostat_tau", "mirostat_eta")
SYSTEM = ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "vocab_only", "use_mmap", "use_mlock")
SYSTEM += ("f16_kv", "logits_all", "penalize_newline", "draft_num_predict")  # of another engine; ignored
NAMES = {"num_keep": "n_keep"}
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|-?\d+(?:\.\d+)?")
PIECE = re.compile(r"(\d+(?:\.\d+)?)([a-zµ]+)")


def as_openai(body: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return fields of chat completions for a body of `/api/chat` or `/api/generate`.

    These are the model, the switch of reasoning, stream (by default true) and the options in SAMPLING; none of their
    values is checked. Messages, prompt, tools and format are not converted. warnings: appended to, for unknown fields
    and options. Raises Refused for a field in REFUSED that is not empty, and for `options` that is no object.
    """
    for name, reason in REFUSED.items():
        if body.get(name):
            raise Refused(f"{name}: {reason}", param=name)
    options = fields_of(body, "options")
    for kind, names, known in (("field", body, FIELDS), ("option", options, ("num_predict", *SAMPLING, *SYSTEM))):
        warnings += [f"unknown {kind} {name[:80]!r} is ignored" for name in names if name not in known]
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"keep_alive={repr(value)[:80]}: allowed are seconds, or a text such as 5m", param="keep_alive")
    return float("inf") if value < 0 else float(value)


def chat_messages(body: dict[str, Any]) -> list[Any]:
    """Return the messages of `/api/chat` with ids that link tool results to their calls; [] without messages.

    Tool calls without an id get one. A tool result without an id gets that of the first call that has no result yet
    in the latest message with calls; if the result names its tool, of the first call of this tool. Nothing else is
    changed or checked, but for messages that are no list, which raises Refused.
    """
    found: list[Any] = []
    pending: list[dict[str, Any]] = []
    number = 0
    for given in field_of(body, "messages", "a list of objects", lambda v: isinstance(v, list)) or []:
        message = dict(given) if isinstance(given, dict) else given
        found.append(message)
        if not isinstance(message, dict):
            continue
        if isinstance(calls := message.get("tool_calls"), list) and calls:
            message["tool_calls"] = [_with_id(call, number + i) for i, call in enumerate(calls)]
            number += len(calls)
            pending = [call for call in message["tool_calls"] if isinstance(call, dict)]
        if message.get("role") == "tool":
            _link(message, message.get("tool_name") or message.get("name"), pending)
    return found


def _with_id(call: Any, number: int) -> Any:
    return {"id": f"call_{number}", **call} if isinstance(call, dict) else call


def _link(result: Message, name: Any, pending: list[dict[str, Any]]) -> None:
    """Add `name`, unless it is empty, to a tool result and, if the result has no id, that of its call.

    The call is the first of `pending` that has the result's id or, if the result has none, the name ("": any); it is
    removed from `pending`.
    """
    if name:
        result["name"] = name
    given = result.get("tool_call_id")
    fits = [call for call in pending if given in (None, call["id"]) and (given or not name or name == _name(call))]
    if fits:
        pending.remove(fits[0])
        result["tool_call_id"] = fits[0]["id"]


def _name(call: dict[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def generate_messages(body: dict[str, Any], contents: Contents) -> list[Message]:
    """Return the messages of `/api/generate` for the chat template: `system`, unless it is empty, and `prompt`.

    The user message of the prompt has the pictures in `images`. Raises Refused for fields of another type.
    """
    system, given = text(body, "system"), {"content": text(body, "prompt"), "images": body.get("images")}
    question = message_of_chat({"role": "user", **given}, Place("", new=True), contents)
    return [*([{"role": "system", "content": system}] if system else []), question]
