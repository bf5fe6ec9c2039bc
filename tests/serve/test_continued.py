"""Continue an unfinished last answer: the prompt ends with its text, and the new answer starts after it."""

import pytest
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper
from thinking import plain_tokenizer, thinks

from mlx_mtp.decoding.stats import Stats
from mlx_mtp.generate import text_response
from mlx_mtp.serve.continued import Continuation, finished
from mlx_mtp.serve.prompts import encode_chat, marks_of

ROLE = "{{ '<|im_start|>' + m.role + '\\n' }}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CONTENT = "{% for m in messages %}" + ROLE + "{{ EXPRESSION }}{{ '<|im_end|>\\n' }}{% endfor %}"
PLAIN = CONTENT.replace("EXPRESSION", "m.content") + OPENS
STRIPS = CONTENT.replace("EXPRESSION", "m.content | trim") + OPENS
THINKS = (
    "{% for m in messages %}" + ROLE + "{% if m.role == 'assistant' %}{{ '<think>\\n' }}"
    "{% if m.reasoning_content %}{{ m.reasoning_content.strip('\\n') }}{% endif %}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content.lstrip('\\n') }}{{ '<|im_end|>\\n' }}{% endfor %}"
) + OPENS
DROPS = CONTENT.replace("EXPRESSION", "m.content.split('</think>')[-1]") + OPENS
REFUSES = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
PROMPTED = PLAIN.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif").join(
    ["{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}", ""]
)
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def encoded():
    plain = plain_tokenizer()
    tokenizer = TokenizerWrapper(plain)
    thinks(tokenizer)

    def encode(template, last, **how):
        plain.chat_template = template
        messages = [{"role": "user", "content": "List."}, last]
        prompt = encode_chat(tokenizer, marks_of(tokenizer), messages, None, {}, turns=True, **how)
        return tokenizer.decode(prompt.tokens)

    return encode


def unfinished(content="", reasoning=""):
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


@pytest.mark.parametrize("template", [PLAIN, STRIPS, THINKS, DROPS, REFUSES])
@pytest.mark.parametrize("content", ["1.", "1. ", "1.\n\n", "ünï \t\n", "a <|im_end|> b", "List."])
def test_the_prompt_ends_with_the_unfinished_text_byte_for_byte(encoded, template, content):
    text = encoded(template, unfinished(content))
    assert text.endswith(content)
    assert text.count(ASSISTANT) == 1
    assert text.startswith("<|im_start|>user\nList.<|im_end|>\n")


@pytest.mark.parametrize("template", [PLAIN, THINKS, DROPS, REFUSES])
@pytest.mark.parametrize("last", [unfinished(reasoning="Let me "), unfinished("<think>\nLet me ")])
def test_reasoning_that_has_not_ended_is_continued(encoded, template, last):
    text = encoded(template, last)
    assert text.endswith("<think>\nLet me ")
    assert "</think>" not in text.partition(ASSISTANT)[2]


@pytest.mark.parametrize("template", [PLAIN, THINKS, DROPS, REFUSES, PROMPTED])
def test_reasoning_before_unfinished_content_stays(encoded, template):
    text = encoded(template, unfinished("So ", "hm, well"))
    assert text.endswith(ASSISTANT + "<think>\nhm, well\n</think>\n\nSo ")


def test_content_after_a_prompt_that_opens_reasoning_closes_it(encoded):
    assert encoded(PROMPTED, unfinished("So ")).endswith(ASSISTANT + "<think>\n\n</think>\n\nSo ")
    assert encoded(PROMPTED, unfinished("", "hm ")).endswith(ASSISTANT + "<think>\nhm ")


@pytest.mark.parametrize("template", [PLAIN, THINKS, REFUSES])
def test_an_empty_last_answer_adds_nothing_to_the_prompt(encoded, template):
    assert encoded(template, unfinished()).endswith(f"List.<|im_end|>\n{ASSISTANT}")


def test_a_message_that_is_not_continued_is_closed(encoded):
    assert encoded(PLAIN, unfinished("1."), continues=False).endswith(f"1.<|im_end|>\n{ASSISTANT}")
    assert encoded(PLAIN, unfinished("1."), answers=False).endswith("1.<|im_end|>\n")
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert encoded(PLAIN, {**unfinished("1."), "tool_calls": calls}).endswith(f"<|im_end|>\n{ASSISTANT}")


def test_an_answer_is_joined_with_the_unfinished_one():
    user = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": " two", "tool_calls": [1]}
    assert finished([user, unfinished("one", "hm")], answer) == [
        user, {"role": "assistant", "content": "one two", "reasoning_content": "hm", "tool_calls": [1]},
    ]  # fmt: skip
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "m"}
    assert finished([unfinished("", "h")], answer) == [unfinished("yes", "hm")]


@pytest.mark.parametrize("detokenizer", [BPEStreamingDetokenizer, NaiveStreamingDetokenizer])
@pytest.mark.parametrize("rest", [" two", "  two", "two", "\n two", " "])
def test_spaces_before_the_rest_stay(detokenizer, rest):
    tokenizer = TokenizerWrapper(plain_tokenizer(), detokenizer)
    prompt, tokens = (tokenizer.encode(text, add_special_tokens=False) for text in ("one ", rest + " end"))
    found, continuation, streaming = "", Continuation(tokenizer, prompt), tokenizer.detokenizer
    for i, token in enumerate(tokens):
        reason = "length" if i + 1 == len(tokens) else None
        found += continuation.text_of(text_response(streaming, (token, None, False), Stats(), reason))
    assert found == rest + " end"


def test_line_breaks_before_the_rest_are_returned_once():
    continuation = Continuation(TokenizerWrapper(plain_tokenizer()), [5])
    assert [continuation.line_breaks(text) for text in ("\n", "\n\na\n", "\nb")] == ["\n", "\n\n", ""]


# Over HTTP


QUESTION = {"role": "user", "content": "What does len do?"}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def rest_of(served, api, content, most=12, **more):
    messages = [QUESTION, {"role": "assistant", "content": content}]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body = {"input" if api == "responses" else "messages": messages, limit: most}
    found = served.post(PATHS[api], json={**body, **more})
    assert found.status_code == 200, found.text
    answer = found.json()
    if api == "chat":
        return answer["choices"][0]["message"]["content"]
    return "".join(
        block["text"] for block in (answer["content"] if api == "messages" else answer["output"][0]["content"])
    )


@pytest.fixture(scope="module")
def whole(served):
    body = {"messages": [QUESTION], "max_tokens": 12}
    return served.post(PATHS["chat"], json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("api", PATHS)
def test_every_api_continues_where_the_answer_was_cut(served, whole, api):
    tokenizer = served.service.info.tokenizer
    ids = tokenizer.encode(whole, add_special_tokens=False)
    for cut, more in ((1, {}), (6, {"continue_final_message": True, "add_generation_prompt": False})):
        front = tokenizer.decode(ids[:cut])
        assert rest_of(served, api, front, **more) == whole.removeprefix(front)
    assert rest_of(served, api, whole[:9], 4, continue_final_message=False) == rest_of(
        served, api, whole[:9], 4, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "messages": [QUESTION]},
        {"continue_final_message": "yes"},
    ],
)
def test_fields_that_contradict_a_continuation_are_refused(served, wrong):
    messages = [QUESTION, {"role": "assistant", "content": "1."}]
    found = served.post(PATHS["chat"], json={"messages": messages, "max_tokens": 2, **wrong})
    assert found.status_code == 400
    assert "continue_final_message" in found.json()["error"]["message"]


def test_count_tokens_includes_the_unfinished_answer(served):
    def count(**more):
        body = {"messages": [QUESTION, {"role": "assistant", "content": "The"}], **more}
        return served.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]

    assert count() < count(continue_final_message=False)
