"""List the tool-call formats, and choose the one that a tokenizer's model writes."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from ..template_traits import NAME, probes
from .call_format import CallFormat, skip_space
from .gemma import GemmaCalls
from .json_calls import JsonCalls
from .pythonic import PythonicCalls
from .schema import Tools
from .tagged import TaggedCalls

PLAIN = r"{name}(?![\w.-])"
CODER = TaggedCalls(
    "<tool_call>", "</tool_call>", r"<function={name}>", r"<parameter=(?P<key>[^>\n]+)>", "</parameter>",
    "</function>", "\n",
)  # fmt: skip
SEED = dataclasses.replace(CODER, start="<seed:tool_call>", end="</seed:tool_call>", pad="")
GLM = TaggedCalls(
    "<tool_call>", "</tool_call>", PLAIN, r"<arg_key>(?P<key>[^<]+)</arg_key>(?:\\n|\s)*<arg_value>", "</arg_value>"
)
LONGCAT = TaggedCalls(
    "<longcat_tool_call>", "</longcat_tool_call>", PLAIN,
    r"<longcat_arg_key>(?P<key>[^<]+)</longcat_arg_key>(?:\\n|\s)*<longcat_arg_value>", "</longcat_arg_value>",
)  # fmt: skip
HY = TaggedCalls(
    "<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>{name}<tool_sep:opensource>",
    r"<arg_key:opensource>(?P<key>[^<]+)</arg_key:opensource>\s*<arg_value:opensource>", "</arg_value:opensource>",
    "</tool_call:opensource>",
)  # fmt: skip
MINIMAX = TaggedCalls(
    "<minimax:tool_call>", "</minimax:tool_call>", r'<invoke name="{name}">',
    r'<parameter name="(?P<key>[^">]+)">', "</parameter>", "</invoke>",
)  # fmt: skip
NAMESPACE = "]<]minimax[>["  # one token of MiniMax-M3's vocabulary
MINIMAX_M3 = TaggedCalls(
    f"{NAMESPACE}<tool_call>", f"{NAMESPACE}</tool_call>", rf'{re.escape(NAMESPACE)}<invoke name="{{name}}">',
    rf"{re.escape(NAMESPACE)}<(?P<key>[^<>/]+)>", f"{NAMESPACE}</{{key}}>", f"{NAMESPACE}</invoke>", nested=NAMESPACE,
)  # fmt: skip
MINICPM = TaggedCalls(
    "", "", r'<function name="{name}">', r'<param name="(?P<key>[^">]+)">', "</param>", "</function>", cdata=True
)
MUSE = TaggedCalls(
    "<atem:function_calls>", "</atem:function_calls>", r'<atem:invoke [^>]*?name="{name}"[^>]*>',
    r'<atem:parameter [^>]*?name="(?P<key>[^">]+)"[^>]*>', "</atem:parameter>", "</atem:invoke>",
)  # fmt: skip
KIMI_K3 = TaggedCalls(
    "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", r'<\|open\|>call tool="{name}"[^<]*<\|sep\|>',
    r'<\|open\|>argument key="(?P<key>[^"]+)"(?: type="(?P<type>\w+)")?[^<]*<\|sep\|>',
    "<|close|>argument<|sep|>", "<|close|>call<|sep|>",
)  # fmt: skip
DSML = TaggedCalls(
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", r'<｜DSML｜invoke name="{name}">',
    r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<type>true|false)">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>",
)  # fmt: skip
DSML_TOOLS = dataclasses.replace(DSML, start="<｜DSML｜tool_calls>", end="</｜DSML｜tool_calls>")
HERMES = JsonCalls("<tool_call>", "</tool_call>")
GENERIC = JsonCalls("<tool_call>", "</tool_call>")  # of models whose format is unknown; the prompt describes it
LLAMA = JsonCalls("<|python_tag|>", "<|eom_id|>")
MISTRAL = JsonCalls("[TOOL_CALLS]", head=r"{name}\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
KIMI_K2 = JsonCalls(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", r"(?:functions\.)?{name}(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
    r"<\|tool_call_end\|>",
)  # fmt: skip
DEEPSEEK = JsonCalls(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", r"(?:function<｜tool▁sep｜>)?\s*{name}\s*(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?",
    r"(?:```\s*)?<｜tool▁call▁end｜>",
)  # fmt: skip
HUNYUAN = JsonCalls(
    "<tool_calls>", "</tool_calls>", "<tool_call>", r"{name}<tool_sep>\s*```json\s*", r"```\s*</tool_call>"
)
SOLAR = JsonCalls(
    "<|tool_calls|>", "<|calls|>",
    "<|tool_call:begin|>", r"[^<]*<\|tool_call:name\|>{name}<\|tool_call:args\|>\s*", r"<\|tool_call:end\|>",
)  # fmt: skip
# The name is before or after the channel; a call may be in any channel.
HARMONY = JsonCalls(
    "<|start|>assistant", call="<|channel|>",
    head=r"(?:[a-z]+\s+)?to=(?:functions\.)?{name}(?![\w.-])\s*(?:<\|channel\|>[a-z]+\s*)?(?:<\|constrain\|>)?\s*[a-z]*\s*"
    r"<\|message\|>\s*",
    foot=r"<\|(?:call|end|return)\|>",
)  # fmt: skip
FUNCTIONARY = JsonCalls("<function=", head=r"{name}>\s*", foot="</function>")
FUNCTIONARY_3_2 = JsonCalls(">>>", head=r"{name}\n", shared=True)
# Other models that write a list or a line of JSON between marks.
PLAIN_JSON = (
    HERMES,
    JsonCalls("<tool_calls>", "</tool_calls>"),  # Apriel, MiniMax-M1
    JsonCalls("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron
    JsonCalls("<|tool_call|>", "<|/tool_call|>"),  # Granite 3, Phi-4
    JsonCalls("<|START_ACTION|>", "<|END_ACTION|>"),  # Command-R7B, Command-A
    JsonCalls("Action:\n```json", "```"),  # Command-R+
    JsonCalls("<|tools_prefix|>", "<|tools_suffix|>", names_are_keys=True),  # Apertus
    JsonCalls("<|message_sep|>\n\nfunction call<|role_sep|>"),  # GigaChat3
    JsonCalls("<|function_call|>"),  # GigaChat3.1
)
JSON = (MISTRAL, KIMI_K2, DEEPSEEK, HUNYUAN, SOLAR, HARMONY, FUNCTIONARY, FUNCTIONARY_3_2, *PLAIN_JSON)
TAGGED = (CODER, SEED, GLM, LONGCAT, HY, MINIMAX, MINIMAX_M3, MINICPM, MUSE, KIMI_K3, DSML, DSML_TOOLS)
GEMMA_4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
PYTHONIC = PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>")
PYTHONIC_PLAIN = dataclasses.replace(PYTHONIC, escaped=False)
FORMATS: tuple[CallFormat, ...] = (
    *(dataclasses.replace(tags, pad=pad) for tags in TAGGED for pad in ("", "\n")),
    *JSON,
    GEMMA_4,
    FUNCTION_GEMMA,
    PYTHONIC_PLAIN,
    PYTHONIC,
    LLAMA,  # last, because its calls need no mark
)
# Keys: names of mlx-lm's parsers, or their last words.
BY_PARSER: dict[str, CallFormat] = {
    "coder": CODER,
    "glm47": GLM,
    "laguna": GLM,
    "longcat": LONGCAT,
    "minimax_m2": MINIMAX,
    "minicpm5": MINICPM,
    "muse_spark": MUSE,
    "kimi_k3": KIMI_K3,
    "json_tools": HERMES,
    "mistral": MISTRAL,
    "kimi_k2": KIMI_K2,
    "gemma4": GEMMA_4,
    "function_gemma": FUNCTION_GEMMA,
    "pythonic": PYTHONIC,
}
# Keys: marks in a chat template that renders no call; the first three are also searched in the vocabulary.
BY_MARK: dict[str, CallFormat] = {
    "<｜DSML｜": DSML,
    NAMESPACE: MINIMAX_M3,
    "<|python_tag|>": LLAMA,
    "<|channel|>commentary": HARMONY,
    "<｜tool▁calls▁begin｜>": DEEPSEEK,
    **{marks.start: marks for marks in PLAIN_JSON},
}


def format_of(tokenizer: Any) -> CallFormat | None:
    """Return the format in which a tokenizer's model writes tool calls, None if it is unknown.

    It is one that reads back a call that the chat template rendered, else that of mlx-lm's parser, else one whose
    mark is in the template. The first three marks of BY_MARK also count if they are in the vocabulary.
    """
    if format := _as_rendered(tokenizer):
        return format
    if tokenizer.has_tool_calling:
        parser = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
        if format := BY_PARSER.get(parser) or BY_PARSER.get(parser.rpartition("_")[2]):
            return format
    template = getattr(tokenizer, "chat_template", None)
    written = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    marks = [mark for mark in list(BY_MARK)[:3] if mark in tokenizer.get_vocab()]
    return next((BY_MARK[mark] for mark in (*marks, *BY_MARK) if mark in marks or mark in written), None)


def unread_calls(tokenizer: Any, format: CallFormat | None) -> str | None:
    """Return why calls in answers may be returned as text; None if that is not expected.

    That is: a format is known, and one of FORMATS reads what the template renders, unless it renders no calls.
    """
    if format is None:
        return "the chat template names no known format of tool calls"
    printed = any(NAME in probe.text for probe in probes(tokenizer, {"text": "x", "more": "y"}))
    if printed and _as_rendered(tokenizer) is None:
        return "the chat template renders tool calls in an unknown format"
    return None


def _as_rendered(tokenizer: Any) -> CallFormat | None:
    """Return the format that recovers a call's arguments from the template's rendering; None if none does."""
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in ("text", "more")}}
    tools = Tools([{"type": "function", "function": {"name": NAME, "parameters": parameters}}])
    for text, more in (("\n <x> \n", "\n"), ("x", "y")):
        arguments = {"text": text, "more": more}
        for probe in probes(tokenizer, arguments):
            for format in FORMATS:
                if arguments in _calls_in(probe.text, format, tools):
                    return format
    return None


def _calls_in(text: str, format: CallFormat, tools: Tools) -> Iterator[Any]:
    """Yield the arguments of the calls in a text; calls without a mark count only in the last of FORMATS."""
    for match in format.opening(tools).finditer(text):
        if not text.startswith(format.marks, skip_space(text, match.start())) and format is not FORMATS[-1]:
            continue
        if reading := format.read(text[match.start() :], tools, complete=False):
            yield from (json.loads(call.arguments) for call in reading.calls)
