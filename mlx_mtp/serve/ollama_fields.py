"""Convert request fields of Ollama's API to those of OpenAI's chat completions."""

import re
from typing import Any

from .chat import message_of_chat
from .contents import MessageContents
from .field_table import unknown_names
from .fields import Refused, check_size, field_of, fields_of, shown, text
from .forms import Message
from .output_format import GUIDED
from .places import RequestPlace
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
    options = fields_of(body, "options")
    found = field_of(options, "num_predict", allowed, lambda v: type(v) is int and -2 <= v < LARGE and v != 0)
    return -1 if found == -2 else found


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


def chat_messages(body: dict[str, Any]) -> list[Any]:
    """Return the messages of `/api/chat`, in which the name of a tool result is also in `tool_name`, which links it.

    Nothing else is changed or checked, but for messages that are no list, which raises Refused.
    """
    given = field_of(body, "messages", "a list of objects", lambda v: isinstance(v, list)) or []
    return [_named(each) if isinstance(each, dict) and each.get("role") == "tool" else each for each in given]


def _named(result: dict[str, Any]) -> dict[str, Any]:
    name = result.get("tool_name") or result.get("name")
    return {**result, "name": name, "tool_name": name if isinstance(name, str) else None}


def generate_messages(body: dict[str, Any], contents: MessageContents) -> list[Message]:
    """Return the messages of `/api/generate` for the chat template: `system`, unless it is empty, and `prompt`.

    The user message of the prompt has the pictures in `images`. Raises Refused for fields of another type.
    """
    system, given = text(body, "system"), {"content": text(body, "prompt"), "images": body.get("images")}
    question = message_of_chat({"role": "user", **given}, RequestPlace("", new=True), contents)
    return [*([{"role": "system", "content": system}] if system else []), question]
