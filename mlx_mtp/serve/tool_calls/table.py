"""The formats of tool calls, and which of them a tokenizer's model writes."""

import dataclasses
import json
import re
import sys
from typing import Any

from ...cache.prompt_prefix import render
from .call_format import CallFormat
from .foreign import ForeignCalls
from .gemma import GemmaCalls
from .json_calls import JsonCalls, JsonMarks
from .pythonic import PythonicCalls
from .tagged import Tagged, Tags

NAME = r"{name}(?![\w.-])"
QWEN_CODER = Tags(
    "<tool_call>",
    "</tool_call>",
    r"<function={name}>",
    r"<parameter=(?P<key>[^>\n]+)>",
    "</parameter>",
    "</function>",
    "\n",
)
GLM = Tags(
    "<tool_call>", "</tool_call>", NAME, r"<arg_key>(?P<key>[^<]+)</arg_key>(?:\\n|\s)*<arg_value>", "</arg_value>"
)
LONGCAT = Tags(
    "<longcat_tool_call>", "</longcat_tool_call>", NAME,
    r"<longcat_arg_key>(?P<key>[^<]+)</longcat_arg_key>(?:\\n|\s)*<longcat_arg_value>", "</longcat_arg_value>",
)  # fmt: skip
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", r'<invoke name="{name}">',
    r'<parameter name="(?P<key>[^">]+)">', "</parameter>", "</invoke>",
)  # fmt: skip
MINICPM = Tags(
    "", "", r'<function name="{name}">', r'<param name="(?P<key>[^">]+)">', "</param>", "</function>", cdata=True
)
MUSE = Tags(
    "<atem:function_calls>", "</atem:function_calls>", r'<atem:invoke [^>]*?name="{name}"[^>]*>',
    r'<atem:parameter [^>]*?name="(?P<key>[^">]+)"[^>]*>', "</atem:parameter>", "</atem:invoke>",
)  # fmt: skip
KIMI_K3 = Tags(
    "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", r'<\|open\|>call tool="{name}"[^<]*<\|sep\|>',
    r'<\|open\|>argument key="(?P<key>[^"]+)"(?: type="(?P<type>\w+)")?[^<]*<\|sep\|>',
    "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
)  # fmt: skip
DSML = Tags(
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", r'<｜DSML｜invoke name="{name}">',
    r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<type>true|false)">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>",
)  # fmt: skip
HERMES = JsonMarks("<tool_call>", "</tool_call>")
LLAMA = JsonMarks("<|python_tag|>", "<|eom_id|>")
MISTRAL = JsonMarks("[TOOL_CALLS]", head=r"{name}\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
KIMI_K2 = JsonMarks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", r"(?:functions\.)?{name}(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
    r"<\|tool_call_end\|>",
)  # fmt: skip
DEEPSEEK = JsonMarks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", r"(?:function<｜tool▁sep｜>)?\s*{name}\s*(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?",
    r"(?:```\s*)?<｜tool▁call▁end｜>",
)  # fmt: skip
# By the names of mlx-lm's parsers, whose rules recognize a template.
BY_PARSER: dict[str, CallFormat] = {
    "qwen3_coder": Tagged(QWEN_CODER),
    "glm47": Tagged(GLM),
    "laguna": Tagged(GLM),
    "longcat": Tagged(LONGCAT),
    "minimax_m2": Tagged(MINIMAX),
    "minicpm5": Tagged(MINICPM),
    "muse_spark": Tagged(MUSE),
    "kimi_k3": Tagged(KIMI_K3),
    "json_tools": JsonCalls(HERMES),
    "mistral": JsonCalls(MISTRAL),
    "kimi_k2": JsonCalls(KIMI_K2),
    "gemma4": GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>"),
}


def format_of(tokenizer: Any) -> CallFormat | None:
    """The format by mlx-lm's rules, else by the marks in the chat template; None where the model has none."""
    template = getattr(tokenizer, "chat_template", None)
    template = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    if tokenizer.has_tool_calling:
        known = BY_PARSER.get(getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2])
        if isinstance(known, Tagged):
            return _as_rendered(known, tokenizer)
        own = ForeignCalls(tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser)
        return known or own
    if "<｜DSML｜" in template or "<｜DSML｜" in tokenizer.get_vocab() or _renders_dsml(tokenizer):
        return Tagged(DSML)
    if "<｜tool▁calls▁begin｜>" in template:
        return JsonCalls(DEEPSEEK)
    if "<|python_tag|>" in template or "<|python_tag|>" in tokenizer.get_vocab():
        return JsonCalls(LLAMA)
    return None


def _as_rendered(format: Tagged, tokenizer: Any) -> Tagged:
    """The format with the white space that this template puts around values, where it renders a call at all."""
    call = {"type": "function", "id": "call00000", "function": {"name": "name", "arguments": {"key": "value"}}}
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = render(tokenizer, messages, {"add_generation_prompt": False})
    except ValueError:
        return format
    close = re.escape(format.tags.close)
    pad = re.search(rf">(?P<before>\s*)value(?P<behind>\s*){close}", text)
    if pad is None or pad["before"] != pad["behind"]:
        return format
    return Tagged(dataclasses.replace(format.tags, pad=pad["before"]))


def _renders_dsml(tokenizer: Any) -> bool:
    """Whether mlx-lm renders the chat with a module of its own that writes DSML."""
    renderer = getattr(tokenizer, "_chat_template", None)
    return hasattr(sys.modules.get(getattr(renderer, "__module__", "")), "dsml_token")
