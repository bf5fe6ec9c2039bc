"""Structured output with the packages of OpenAI and Anthropic, where these are installed."""

from enum import Enum
from typing import Literal

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

QUESTION = [{"role": "user", "content": "What does len do?"}]
MOST = {"model": "demo", "max_tokens": 120}


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(pydantic.BaseModel):
    n: Literal[1, 2]


class Answer(pydantic.BaseModel):
    name: Literal["x", "yy"]
    color: Color
    inner: Inner
    maybe: Literal["a"] | None
    flag: bool = True


@pytest.fixture
def ours(served):
    return openai.OpenAI(api_key="any", base_url="http://localhost/v1", http_client=served, max_retries=0)


@pytest.fixture
def theirs(served):
    return anthropic.Anthropic(api_key="any", base_url="http://localhost", http_client=served, max_retries=0)


def test_chat_completions_parse(ours):
    whole = ours.chat.completions.parse(messages=QUESTION, response_format=Answer, **MOST).choices[0]
    with ours.chat.completions.stream(messages=QUESTION, response_format=Answer, **MOST) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.done"]
    assert isinstance(whole.message.parsed, Answer)
    assert parsed == [whole.message.parsed]
    assert whole.message.refusal is None
    with pytest.raises(openai.LengthFinishReasonError):
        ours.chat.completions.parse(messages=QUESTION, response_format=Answer, **MOST | {"max_tokens": 5})


def test_responses_parse(ours):
    asked = {"model": "demo", "input": "What does len do?", "text_format": Answer, "max_output_tokens": 120}
    whole = ours.responses.parse(**asked)
    with ours.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == whole.output_parsed
    assert isinstance(whole.output_parsed, Answer)
    assert whole.status == "completed"


def test_messages_parse(theirs):
    whole = theirs.messages.parse(messages=QUESTION, output_format=Answer, **MOST)
    with theirs.messages.stream(messages=QUESTION, output_format=Answer, **MOST) as stream:
        for _ in stream:
            pass
        assert stream.get_final_message().parsed_output == whole.parsed_output
    assert isinstance(whole.parsed_output, Answer)
    assert whole.stop_reason == "end_turn"


def test_refused_schemas_are_bad_requests(ours, theirs):
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"schema\.properties\.a\.not") as e:
            ours.chat.completions.create(messages=QUESTION, response_format=form, stream=stream, **MOST)
        assert e.value.param == "response_format"
        with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema\.properties\.a\.not") as e:
            ours.responses.create(
                model="demo",
                input="x",
                stream=stream,
                text={"format": {"type": "json_schema", "name": "x", "schema": bad}},
            )
        assert e.value.param == "text.format"
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema\.properties\.a\.not"):
            theirs.messages.create(
                messages=QUESTION,
                stream=stream,
                output_config={"format": {"type": "json_schema", "schema": bad}},
                **MOST,
            )


def test_fields_of_vllm_in_the_extra_body(ours):
    chosen = ours.completions.create(model="demo", prompt="Answer:", extra_body={"guided_choice": ["left", "right"]})
    assert chosen.choices[0].text in ("left", "right")
    asked = {"messages": QUESTION, **MOST, "extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}}}
    assert ours.chat.completions.create(**asked).choices[0].message.content.isdigit()
    two = ours.chat.completions.create(messages=QUESTION, n=2, response_format={"type": "json_object"}, **MOST)
    assert [choice.message.content[0] for choice in two.choices] == ["{", "{"]
