"""Split answers: stop strings never leak, reasoning and calls are separate parts, and other text is unchanged."""

from types import SimpleNamespace

import pytest

from mlx_mtp.serve.answer import MOST_UNCERTAIN, Splitter, calls_of, text_of
from mlx_mtp.serve.fields import MAX_WORD, MOST_STOPS
from mlx_mtp.serve.tool_calls.table import BY_PARSER, format_of

THINKING = SimpleNamespace(has_thinking=True, think_start="<think>", think_end="</think>")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
JSON_FORMAT = BY_PARSER["json_tools"]
LLAMA = format_of(SimpleNamespace(has_tool_calling=False, chat_template="<|python_tag|>", get_vocab=dict))


def split(text, size, *, stops=(), cut=False, **options):
    """(content, reasoning, calls, the stop string) of a text that arrives in pieces of `size` characters."""
    splitter, parts = Splitter(THINKING, stops, **options), []
    for i in range(0, len(text), size):
        parts += splitter.feed(text[i : i + size])
        if splitter.stopped is not None:
            break
    parts += splitter.end(cut=cut)
    texts = text_of(parts), text_of(parts, reasoning=True)
    return *texts, [tuple(call) for call in calls_of(parts)], splitter.stopped


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_end_the_text_before_them(size):
    assert split("one two END three", size, stops=("END", "ENOUGH")) == ("one two ", "", [], "END")
    assert split("one two EN", size, stops=("END",)) == ("one two EN", "", [], None)
    assert split("aabaac", size, stops=("aac",)) == ("aab", "", [], "aac")


@pytest.mark.parametrize("size", [1, 5, 100])
def test_reasoning_is_separate(size):
    assert split("\nhm\n</think>\n\nYes.", size, thinking=True, begun=True) == ("Yes.", "hm\n", [], None)
    assert split("<think>a</think>b", size, thinking=True) == ("b", "a", [], None)
    assert split("<think>END</think>b END", size, thinking=True, stops=("END",)) == ("b ", "END", [], "END")
    assert split("<think>a</think>b", size) == ("<think>a</think>b", "", [], None)


@pytest.mark.parametrize("size", [1, 37, 10_000])
def test_what_waits_has_a_bound(size):
    """So that the cost of a token depends neither on the length of the answer nor on the number of stop strings."""
    space = " " * (MOST_UNCERTAIN + 50)
    text = f"{space}<think>x</think>"
    assert split(f"{text}END", size, thinking=True, stops=("END",))[:2] == (text, "")
    stops = tuple("a" * (MAX_WORD - 2) + f"{i:02}" for i in range(MOST_STOPS))
    splitter = Splitter(THINKING, stops, thinking=True)
    for piece in (*space, *"a" * 2000, *space):
        splitter.feed(piece)
        assert len(splitter._text) <= max(MOST_UNCERTAIN + 1, MAX_WORD)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_calls_are_whole(size):
    text = 'Now.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'
    calls = [("f", '{"x": 1}'), ("g", "{}")]
    assert split(text, size, tool_format=JSON_FORMAT, tools=TOOLS) == ("Now.", "", calls, None)
    assert split(text, size, tool_format=JSON_FORMAT)[0] == text
    reasoned = f"hm</think>{text}"
    found = split(reasoned, size, tool_format=JSON_FORMAT, tools=TOOLS, thinking=True, begun=True)
    assert found == ("Now.", "hm", calls, None)


def test_text_that_is_no_call_is_content():
    for text in ("<tool_call>{no json</tool_call> rest", '<tool_call>{"arguments": {}}</tool_call>'):
        assert split(text, 3, tool_format=JSON_FORMAT, tools=TOOLS)[::2] == (text, [])
    begun = '<tool_call>{"name": "f"'
    assert split(begun, 4, tool_format=JSON_FORMAT, tools=TOOLS, cut=True)[::2] == (begun, [])


@pytest.mark.parametrize("size", [1, 100])
def test_llama_3_calls_without_a_mark(size):
    call = '{"name": "f", "parameters": {"x": "y"}}'
    for text in (call, f"<|python_tag|>{call}", f" \n{call}"):
        assert split(text, size, tool_format=LLAMA, tools=TOOLS)[2] == [("f", '{"x": "y"}')], text
    two = split(f"<|python_tag|>{call}; {call}<|eom_id|>", size, tool_format=LLAMA, tools=TOOLS)[2]
    assert len(two) == 2
    for text in ('{"answer": 42}', "{unclear", "Print: {}"):
        assert split(text, size, tool_format=LLAMA, tools=TOOLS)[0] == text


def test_a_template_without_calls_has_no_format():
    assert format_of(SimpleNamespace(has_tool_calling=False, chat_template="{{ messages }}", get_vocab=dict)) is None
