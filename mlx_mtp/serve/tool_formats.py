"""Know how a model writes the calls of tools: mlx-lm's parsers, and the forms of DeepSeek and Llama 3 beside them."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Parser = Callable[[str, Any], Any]
V3_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>.+?)\s*(?:<｜tool▁sep｜>|\n)\s*"
    r"(?:```json\s*)?(?P<arguments>\{.*?\})\s*(?:```)?\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)
INVOKE = re.compile(r'<｜DSML｜invoke name="(?P<name>[^"]+)">(?P<body>.*?)</｜DSML｜invoke>', re.DOTALL)
PARAMETER = re.compile(
    r'<｜DSML｜parameter name="(?P<name>[^"]+)" string="(?P<text>true|false)">(?P<value>.*?)</｜DSML｜parameter>',
    re.DOTALL,
)


@dataclass(frozen=True)
class ToolFormat:
    """The marks around calls, and what parses the text between them, to a dict or a list of {"name", "arguments"}.

    end:   "" where calls go on to the end of the answer.
    whole: an answer that begins with a brace is a call from its first character on, too.
    """

    start: str
    end: str
    parse: Parser
    whole: bool = False

    def calls(self, text: str, tools: Any) -> list[tuple[str, str]]:
        """Read (name, arguments as JSON) of the calls in a text; ValueError where it is none."""
        try:
            found = self.parse(text, tools)
            found = found if isinstance(found, list) else [found]
            calls = [(call["name"], call.get("arguments", {})) for call in found]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError, RecursionError) as e:
            raise ValueError(f"no call of a tool: {text[:80]!r}") from e
        if not calls or not all(isinstance(name, str) and name for name, _ in calls):
            raise ValueError(f"no call of a tool: {text[:80]!r}")
        return [
            (name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
            for name, given in calls
        ]


def format_of(tokenizer: Any) -> ToolFormat | None:
    """Find the tokenizer's format by mlx-lm's rules, else by the marks in its chat template; None: it has none."""
    template = getattr(tokenizer, "chat_template", None)
    template = template if isinstance(template, str) else json.dumps(template or "")
    if tokenizer.has_tool_calling:
        return ToolFormat(tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser)
    if "<｜DSML｜" in template or "<｜DSML｜" in tokenizer.get_vocab() or _renders_dsml(tokenizer):
        return ToolFormat("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _parse_dsml)
    if "<｜tool▁calls▁begin｜>" in template:
        return ToolFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _parse_v3)
    if "<|python_tag|>" in template or "<|python_tag|>" in tokenizer.get_vocab():
        return ToolFormat("<|python_tag|>", "", _parse_python, whole=True)
    return None


def _renders_dsml(tokenizer: Any) -> bool:
    """Tell whether mlx-lm renders the chat with a module of its own that writes DSML."""
    renderer = getattr(tokenizer, "_chat_template", None)
    return hasattr(sys.modules.get(getattr(renderer, "__module__", "")), "dsml_token")


def _parse_v3(text: str, _tools: Any) -> list[dict[str, Any]]:
    return [
        {"name": call["name"].strip(), "arguments": json.loads(call["arguments"])} for call in V3_CALL.finditer(text)
    ]


def _parse_dsml(text: str, _tools: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": call["name"],
            "arguments": {
                p["name"]: p["value"] if p["text"] == "true" else json.loads(p["value"])
                for p in PARAMETER.finditer(call["body"])
            },
        }
        for call in INVOKE.finditer(text)
    ]


def _parse_python(text: str, _tools: Any) -> list[dict[str, Any]]:
    calls, decoder, rest = [], json.JSONDecoder(), text.strip().removesuffix("<|eom_id|>")
    while rest := rest.lstrip(" \n;"):
        call, end = decoder.raw_decode(rest)
        calls.append({"name": call["name"], "arguments": call.get("parameters", call.get("arguments", {}))})
        rest = rest[end:]
    return calls
