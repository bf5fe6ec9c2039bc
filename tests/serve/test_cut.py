"""Every API states that a token limit has cut an answer, and in which item, whole and as a stream."""

import json

import pytest
from templates import OWN, tokenizer_of

from mlx_mtp.decoding.stats import Stats
from mlx_mtp.serve.answer import TextPart, ToolCall
from mlx_mtp.serve.api_request import Answer
from mlx_mtp.serve.chat import ChatRequest
from mlx_mtp.serve.fields import ModelInfo
from mlx_mtp.serve.job import Begun, End
from mlx_mtp.serve.messages import MessagesRequest
from mlx_mtp.serve.prompts import marks_of
from mlx_mtp.serve.responses import ResponsesRequest

THOUGHT, SAID, CALL = TextPart("hm", True), TextPart("Yes"), ToolCall("write", '{"text": "x"}')
NOTHING = TextPart("")
# Parts of an answer, then the response's items; "*" is behind the one that is incomplete if the answer was cut.
ANSWERS = {
    "reasoning": ([THOUGHT, THOUGHT, NOTHING], ["reasoning*"]),
    "reasoning and content": ([THOUGHT, SAID], ["reasoning", "message*"]),
    "content": ([SAID, SAID, NOTHING], ["message*"]),
    "a call": ([THOUGHT, CALL], ["reasoning", "function_call"]),
    "the start of a call as text": ([CALL, SAID], ["function_call", "message*"]),
    "content and two calls": ([SAID, CALL, CALL], ["message", "function_call", "function_call"]),
}


def request_of(kind, **body):
    tokenizer = tokenizer_of(OWN["json"])
    fixed = {"positions": 10**6, "max_tokens": 8, "defaults": {}, "template": {}, "turns": True, "created": 0}
    return kind(body, ModelInfo(names=("demo",), tokenizer=tokenizer, marks=marks_of(tokenizer), **fixed))


def end_of(reason):
    return End(reason, None, Stats(), 0, 0.0, 0)


def events(request, parts, reason):
    """The data of a stream of these parts."""
    sent = [*request.begin(Begun(0))]
    for part in parts:
        sent += request.part(0, part)
    sent += [*request.finish(0, end_of(reason)), *request.close()]
    found = [text.partition("data: ")[2] for text in sent]
    return [json.loads(each) for each in found if each.startswith("{")]


def items(output):
    return [(item["type"], item["status"]) for item in output]


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("name", ANSWERS)
def test_the_item_that_was_cut_is_incomplete(name, reason):
    parts, kinds = ANSWERS[name]
    cut = {True: "incomplete" if reason == "length" else "completed", False: "completed"}
    expected = [(kind.rstrip("*"), cut[kind.endswith("*")]) for kind in kinds]
    whole = request_of(ResponsesRequest, input="Go.").whole([Answer(parts, end_of(reason))])
    assert (whole["status"], items(whole["output"])) == (cut[True], expected)
    found = events(request_of(ResponsesRequest, input="Go."), parts, reason)
    assert items(event["item"] for event in found if event["type"] == "response.output_item.done") == expected
    assert items(found[-1]["response"]["output"]) == expected
    assert found[-1]["response"]["status"] == cut[True]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]


def test_an_answer_without_text_is_an_empty_message_unless_it_was_cut():
    for reason, expected in (("stop", [("message", "completed")]), ("length", [])):
        for parts in ([], [NOTHING]):
            whole = request_of(ResponsesRequest, input="Go.").whole([Answer(parts, end_of(reason))])
            assert items(whole["output"]) == expected
            found = events(request_of(ResponsesRequest, input="Go."), parts, reason)
            assert items(found[-1]["response"]["output"]) == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_the_other_apis_state_the_limit_and_add_no_empty_content(name):
    parts, kinds = ANSWERS[name]
    messages = [{"role": "user", "content": "Go."}]
    chat = request_of(ChatRequest, messages=messages).whole([Answer(parts, end_of("length"))])["choices"][0]
    assert chat["finish_reason"] == "length"
    assert bool(chat["message"]["content"]) == any("message" in kind for kind in kinds)
    whole = request_of(MessagesRequest, messages=messages).whole([Answer(parts, end_of("length"))])
    types = {"reasoning": "thinking", "message": "text", "function_call": "tool_use"}
    assert [block["type"] for block in whole["content"]] == [types[kind.rstrip("*")] for kind in kinds]
    assert whole["stop_reason"] == "max_tokens"
    found = events(request_of(MessagesRequest, messages=messages), parts, "length")
    assert [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"] == [
        types[kind.rstrip("*")] for kind in kinds
    ]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
