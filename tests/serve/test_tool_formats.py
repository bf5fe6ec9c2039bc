"""Read calls of tools in the forms of DeepSeek, which mlx-lm does not know."""

from types import SimpleNamespace

import pytest

from mlx_mtp.serve.tool_formats import format_of

V3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    '```json\n{"x": {"y": 1}}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
)
V32 = (
    '\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="x" string="true">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="y" string="false">[1, 2]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)


@pytest.mark.parametrize(
    ("start", "text", "calls"),
    [
        ("<｜tool▁calls▁begin｜>", V3, [("f", '{"x": {"y": 1}}'), ("g", "{}")]),
        ("<｜DSML｜function_calls>", V32, [("f", '{"x": "1", "y": [1, 2]}')]),
    ],
    ids=["V3", "V3.2"],
)
def test_deepseek_calls(start, text, calls):
    known = format_of(SimpleNamespace(has_tool_calling=False, chat_template=f"... {start} ...", get_vocab=dict))
    assert known
    assert known.start == start
    assert known.calls(text, None) == calls
    with pytest.raises(ValueError, match="no call"):
        known.calls("nothing", None)


def test_mlx_lm_knows_first():
    own = {"tool_call_start": "<a>", "tool_call_end": None, "tool_parser": lambda text, tools: {"name": text}}
    known = format_of(SimpleNamespace(has_tool_calling=True, chat_template="<|python_tag|>", get_vocab=dict, **own))
    assert known
    assert (known.start, known.end, known.calls("f", None)) == ("<a>", "", [("f", "{}")])
