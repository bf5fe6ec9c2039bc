"""List the layouts of each format, as models write it; used if a chat template renders no calls in the format."""

from typing import Any

from ..frames import frames_of
from . import table
from .call_format import CallFormat
from .layouts import ArgumentLayout, CallLayout, rendered_layouts
from .table import NAMESPACE

NAME, ARGUMENTS, PARAMETERS, ID = '{"name": "', '", "arguments": ', '", "parameters": ', ', "id": "call00000"}'
BETWEEN = "}, " + NAME
# fmt: off
TAGS: dict[CallFormat, tuple[CallLayout, ...]] = {
    table.CODER: (CallLayout(
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>\n<tool_call>\n<function=",
        "</function>\n</tool_call>", parameter=ArgumentLayout("<parameter=", ">\n", "\n</parameter>\n"),
    ),),
    table.GLM: (
        CallLayout(
            "<tool_call>", "\n", "</tool_call>\n<tool_call>", "</tool_call>",
            parameter=ArgumentLayout("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        CallLayout(
            "<tool_call>", "", "</tool_call><tool_call>", "</tool_call>",
            parameter=ArgumentLayout("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
    ),
    table.LONGCAT: (CallLayout(
        "<longcat_tool_call>", "\n", "</longcat_tool_call>\n<longcat_tool_call>", "</longcat_tool_call>",
        parameter=ArgumentLayout(
            "<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n",
        ),
    ),),
    table.MINIMAX: (CallLayout(
        '<minimax:tool_call>\n<invoke name="', '">\n', '</invoke>\n<invoke name="', "</invoke>\n</minimax:tool_call>",
        parameter=ArgumentLayout('<parameter name="', '">', "</parameter>\n"),
    ),),
    table.MINIMAX_M3: (CallLayout(
        f'{NAMESPACE}<tool_call>\n{NAMESPACE}<invoke name="', '">',
        f'{NAMESPACE}</invoke>\n{NAMESPACE}<invoke name="', f"{NAMESPACE}</invoke>\n{NAMESPACE}</tool_call>",
        parameter=ArgumentLayout(f"{NAMESPACE}<", ">", NAMESPACE + "</{key}>"),
    ),),
    table.MINICPM: (CallLayout(
        '<function name="', '">', '</function>\n<function name="', "</function>", python=True,
        parameter=ArgumentLayout('<param name="', '">', "</param>"),
    ),),
    table.MUSE: (CallLayout(
        '<atem:function_calls>\n<atem:invoke name="', '">\n', '</atem:invoke>\n<atem:invoke name="',
        "</atem:invoke>\n</atem:function_calls>",
        parameter=ArgumentLayout('<atem:parameter name="', '">', "</atem:parameter>\n"),
    ),),
    table.KIMI_K3: tuple(
        CallLayout(
            '<|open|>tools<|sep|><|open|>call tool="', '" index="1"<|sep|>',
            '<|close|>call<|sep|><|open|>call tool="', "<|close|>call<|sep|><|close|>tools<|sep|>",
            parameter=ArgumentLayout(
                '<|open|>argument key="', '" type="{type}"<|sep|>', "<|close|>argument<|sep|>", ("string", other),
            ),
        )
        for other in ("", "json")
    ),
    table.DSML: (CallLayout(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="', '">\n', '</｜DSML｜invoke>\n<｜DSML｜invoke name="',
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>", parameter=ArgumentLayout(
            '<｜DSML｜parameter name="', '" string="{type}">', "</｜DSML｜parameter>\n", ("true", "false"),
        ),
    ),),
}
JSON: dict[CallFormat, tuple[CallLayout, ...]] = {
    table.HERMES: (
        CallLayout(f"<tool_call>\n{NAME}", ARGUMENTS, f"}}\n</tool_call>\n<tool_call>\n{NAME}", "}\n</tool_call>"),
        CallLayout(f"<tool_call>{NAME}", ARGUMENTS, f"}}</tool_call><tool_call>{NAME}", "}</tool_call>"),
    ),
    table.LLAMA: (
        CallLayout(f"<|python_tag|>{NAME}", PARAMETERS, "}; " + NAME, "}<|eom_id|>", first="<|python_tag|>" + NAME),
        CallLayout(NAME, PARAMETERS, None, "}"),
    ),
    table.MISTRAL: (
        CallLayout("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", ""),
        CallLayout(f"[TOOL_CALLS][{NAME}", ARGUMENTS, f"{ID}, {NAME}", f"{ID}]"),
    ),
    table.KIMI_K2: (CallLayout(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_call_begin|>functions.", "<|tool_call_end|><|tool_calls_section_end|>",
    ),),
    table.DEEPSEEK: (
        CallLayout(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
            "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        CallLayout(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ),
    **{
        marks: (CallLayout(f"{marks.start}[{NAME}", ARGUMENTS, BETWEEN, "}]" + marks.end),)
        for marks in table.PLAIN_JSON if marks is not table.HERMES
    },
}
# A call is in a channel of its own. The start of the message is missing where the prompt ends with it.
HARMONY_LAYOUTS = tuple(
    CallLayout(f"{start}to=functions.", head, None, "<|call|>", first="to=functions.")
    for start, head in (
        ("<|start|>assistant ", "<|channel|>commentary json<|message|>"),
        (" ", "<|channel|>commentary json<|message|>"),
        ("<|start|>assistant<|channel|>commentary ", " <|constrain|>json<|message|>"),
    )
)
# What may precede the calls of an answer that has no content.
LEADS: dict[CallFormat, tuple[str, ...]] = {
    table.SOLAR: ("<|begin|>assistant",),
    table.MUSE: ("<|start|>assistant to={name}<|message|>",),
    table.KIMI_K3: ("<|open|>response<|sep|><|close|>response<|sep|>",),
}
DEFAULTS: dict[CallFormat, tuple[CallLayout, ...]] = {
    **TAGS,
    **JSON,
    table.HARMONY: HARMONY_LAYOUTS,
    table.GEMMA_4: (
        CallLayout("<|tool_call>call:", "{", "}<tool_call|><|tool_call>call:", "}<tool_call|>", separator=","),
    ),
    table.FUNCTION_GEMMA: (CallLayout(
        "<start_function_call>call:", "{", "}<end_function_call><start_function_call>call:", "}<end_function_call>",
        separator=",",
    ),),
    **dict.fromkeys((table.PYTHONIC, table.PYTHONIC_PLAIN), (
        CallLayout("<|tool_call_start|>[", "(", "), ", ")]<|tool_call_end|>", separator=", ", python=True),
    )),
}
# fmt: on


def layouts_of(tokenizer: Any, format: CallFormat) -> tuple[CallLayout, ...]:
    """Return the layouts in which a model may write calls: its chat template's, else the format's defaults.

    HARMONY always has the defaults. Raises ValueError if neither is known.
    """
    found = () if format == table.HARMONY else rendered_layouts(tokenizer, format)
    found = found or DEFAULTS.get(format)
    if not found:
        raise ValueError(
            "no calls can be read in what the chat template renders, so no grammar of calls can be made; leave out "
            "strict, a forced tool_choice and the response format"
        )
    leads = LEADS.get(format, ()) if frames_of(tokenizer) else ()
    return tuple(layout._replace(leads=leads) for layout in found)
