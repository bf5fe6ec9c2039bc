"""Pictures of requests: from the parts of three APIs to the tokens of the prompt."""

import itertools

import pytest
import seeing
from mlx_lm.tokenizer_utils import TokenizerWrapper
from picture_requests import base64_of, body_of, part_of, png, text_of, url_of
from towerless import APIS, SIDE, Eyes, info_of, request_of, text_and_sizes

from mlx_mtp.pictures.image import open_image
from mlx_mtp.pictures.rows import mark_ids
from mlx_mtp.serve.fields import Refused
from mlx_mtp.serve.follow import as_json, from_json
from mlx_mtp.serve.messages import MessagesRequest, count_tokens
from mlx_mtp.serve.ollama import OllamaChat, OllamaGenerate

SEEN = "pictures are not read here"


@pytest.fixture
def info():
    return info_of(vision=Eyes())


A, B = png(16, 8, 10), png(8, 32, 20)
ASKED = {
    "none": ("What?",),
    "one": (A, "What?"),
    "two, adjacent": ("These:", A, B, "What?"),
    "the same twice": (A, "and", A),
    "three": (A, "a", B, "b", A),
}


@pytest.mark.parametrize("result", [(), (A,), ("a.png", B, "read")], ids=["no tool", "a result", "a result of parts"])
@pytest.mark.parametrize("asked", ASKED)
def test_all_apis_make_one_prompt_in_which_pictures_stand_at_their_places(info, asked, result):
    given = [*result, *ASKED[asked]]
    requests = {api: request_of(info, api, body_of(api, *ASKED[asked], result=result)) for api in APIS}
    chat = requests["chat"]
    expected = [info.vision.picture(open_image(each)) for each in given if isinstance(each, bytes)]
    assert list(chat.pictures) == expected
    at = [i for i, token in enumerate(chat.prompt) if token < 0]
    assert [chat.prompt[i] for i in at] == [token for picture in expected for token in picture.tokens]
    text, _ = text_and_sizes(info, chat)
    runs = [len(list(run)) for word, run in itertools.groupby(text.split("<|vision_")) if "image_pad" in word]
    assert sum(runs) == len(expected)
    for request in requests.values():
        assert (request.prompt, request.pictures) == (chat.prompt, chat.pictures)
    assert from_json(as_json(chat)).pictures == chat.pictures


def test_texts_keep_their_places_between_pictures(info):
    text, sizes = text_and_sizes(info, request_of(info, "chat", body_of("chat", "one", A, "two", B, "three")))
    mark = "<|vision_start|>" + "{}" + "<|vision_end|>"
    pads = [mark.format("<|image_pad|>" * rows) for rows in (2, 4)]
    assert f"user\none{pads[0]}two{pads[1]}three<|im_end|>" in text
    assert sizes == [(1, 2), (4, 1)]


def ollama_requests(info, *pictures, text="What?", result=()):
    """The requests of `/api/chat`, and without a result of `/api/generate`, for pictures as files or as texts."""
    images = [each if isinstance(each, str) else base64_of(each) for each in pictures]
    question = {"role": "user", "content": text, "images": images}
    call = {"function": {"name": "read", "arguments": {}}}
    tool = {"role": "tool", "tool_name": "read", "content": "a", "images": [base64_of(each) for each in result]}
    before = [{"role": "user", "content": "Read."}, {"role": "assistant", "content": "", "tool_calls": [call]}, tool]
    requests = [OllamaChat({"messages": [*(before if result else []), question]}, info)]
    return requests + ([] if result else [OllamaGenerate({"prompt": text, "images": images}, info)])


@pytest.mark.parametrize("result", [(), (A, B)], ids=["no tool", "a result"])
@pytest.mark.parametrize("asked", [(A,), (A, B), ()])
def test_ollamas_pictures_stand_before_the_text_of_their_message(info, asked, result):
    chat = request_of(info, "chat", body_of("chat", *asked, "What?", result=result and (*result, "a")))
    for request in ollama_requests(info, *asked, result=result):
        (found,) = request.requests
        assert (found.prompt, found.pictures) == (chat.prompt, chat.pictures)


def test_ollamas_prompt_may_be_a_picture_alone(info):
    chat = request_of(info, "chat", body_of("chat", A))
    assert [request.requests[0].prompt for request in ollama_requests(info, A, text="")] == [chat.prompt] * 2


@pytest.mark.parametrize(
    ("pictures", "reason"),
    [
        (("data:image/png;base64,!!!!",), "picture 1.*base64"),
        ((A, ""), "picture 2.*data is missing"),
        ((A, b"text"), "picture 2.*not a PNG"),
        (("/etc/passwd",), "picture 1"),
        (("https://example.org/a.png",), "picture 1.*base64"),
        (("data:image/png,abc",), "picture 1.*base64"),
        (21 * (A,), "more than 20"),
    ],
)
def test_ollamas_broken_pictures_are_refused(info, pictures, reason):
    with pytest.raises(Refused, match=f"(?s){reason}") as refused:
        ollama_requests(info, *pictures)
    assert (refused.value.status, len(str(refused.value)) < 300) == (400, True)


@pytest.mark.parametrize("api", APIS)
def test_the_last_turn_begins_where_its_content_begins_behind_pictures(info, api):
    whole = request_of(info, api, body_of(api, A, "What?", result=(B,)))
    plain = request_of(info_of(), api, body_of(api, "What?", result=("b",)))
    asked = [info.tokenizer.decode(mark_ids(r.prompt[: r.turns[-1]], seeing.PAD))[-6:] for r in (whole, plain)]
    assert asked[0] == asked[1]
    assert len(whole.turns) == len(plain.turns)


@pytest.mark.parametrize("api", APIS)
def test_a_low_detail_is_a_small_picture(info, api):
    if api == "messages":
        pytest.skip("Anthropic's pictures have no detail")
    parts = [part_of(api, png(1600, 1600), detail=detail) for detail in ("auto", "low")]
    question = [{"role": "user", "content": parts}]
    request = request_of(info, api, {"input" if api == "responses" else "messages": question})
    assert [picture.grid for picture in request.pictures] == [(1, 200, 200), (1, 64, 64)]


def test_data_of_base64_may_begin_as_a_data_url(info):
    for data in (url_of(A), " " + url_of(A).upper()[:5] + url_of(A)[5:]):
        part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        question = {"role": "user", "content": [part]}
        assert len(request_of(info, "messages", {"messages": [question], "max_tokens": 1}).pictures) == 1
        (request,) = OllamaGenerate({"prompt": "What?", "images": [data]}, info).requests
        assert len(request.pictures) == 1


def test_tokens_are_counted_without_decoding(info):
    body = body_of("messages", A, "What?", png(800, 800), result=(B, "b"))
    counted = count_tokens(body, info)[0]["input_tokens"]
    assert info.vision.opened == []
    assert counted == len(request_of(info, "messages", body).prompt)


def turns_of(api, count, width=SIDE):
    """A conversation in which a user sends `count` pictures, one at a time, and then asks."""
    name = "input" if api == "responses" else "messages"
    sent = [[{"role": "user", "content": [part_of(api, png(width, 8 * (1 + i)))]}, SAID] for i in range(count)]
    return {name: [*itertools.chain(*sent), {"role": "user", "content": "And now?"}]}


SAID = {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("count", "first"), [(20, 0), (21, 10), (30, 10), (31, 20), (50, 30)])
def test_of_a_conversation_the_newest_pictures_are_read(info, api, count, first):
    """Ten of the oldest at a time become lines, so that nine of ten prompts begin with the tokens of the last one."""
    request = APIS[api](turns_of(api, count), info)
    text, sizes = text_and_sizes(info, request.requests[0])
    assert sizes == [(1 + i, 1) for i in range(first, count)]
    assert text.count("user\n[old picture]<|im_end|>") == first
    assert [warning.partition(" was left out")[0] for warning in request.warnings] == (
        [f"{', '.join(PLACES[api].format(2 * i) for i in range(3))} and {first - 3} more: a picture"] if first else []
    )


PLACES = {"responses": "input[{}].content[0]"} | dict.fromkeys(["chat", "messages"], "messages[{}].content[0]")


@pytest.mark.parametrize("api", APIS)
def test_a_conversation_longer_than_the_context_loses_its_oldest_pictures_first(info, api):
    body = turns_of(api, 15, 10 * SIDE)
    whole = len(request_of(info, api, body).prompt)
    small = info_of(vision=Eyes(), positions=whole)
    found = APIS[api](body, small)
    assert [picture.grid[1] for picture in found.requests[0].pictures] == [11, 12, 13, 14, 15]
    assert found.warnings[-1].startswith("the oldest 10 pictures were left out")
    if api == "messages":
        assert count_tokens(body, small)[0]["input_tokens"] == len(found.requests[0].prompt)
    rows = sum(10 * (1 + i) for i in range(15))
    found = APIS[api](body, info_of(vision=Eyes(), positions=rows))  # so the oldest need not be decoded
    assert "the pictures of the conversation are longer than the model's context" in found.warnings[0]


@pytest.mark.parametrize("api", APIS)
def test_without_a_tower_a_question_is_refused_and_a_result_becomes_a_line(api):
    blind = info_of(blind="no tower; load another file")
    with pytest.raises(Refused, match=f"{SEEN}.*: no tower; load another file"):
        APIS[api](body_of(api, A, "What?"), blind)
    with pytest.raises(Refused, match=f"{SEEN}.*: no tower; load another file"):
        ollama_requests(blind, A)
    request = APIS[api](body_of(api, "What?", result=("a.png", A)), blind)
    text, sizes = text_and_sizes(blind, request.requests[0])
    assert (sizes, "[A picture was left out: " + SEEN in text) == ([], True)
    assert any("replaced by a line" in warning for warning in request.warnings)
    name = "input" if api == "responses" else "messages"  # a session that began with a model that reads pictures
    request = APIS[api]({name: [*body_of(api, A, "What?")[name], SAID, {"role": "user", "content": "Why?"}]}, blind)
    assert f"[A picture was left out: {SEEN}.]\nWhat?" in text_and_sizes(blind, request.requests[0])[0]
    assert request.warnings[0].startswith(f"{name}[0].content[0]: a picture was left out")


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_picture_that_the_template_refuses_is_left_out_of_a_system_message(info, api, role):
    body = body_of(api, B, "What?")
    name = "input" if api == "responses" else "messages"
    body[name].insert(0, {"role": role, "content": [text_of(api, "Look."), part_of(api, A)]})
    for _ in range(2):
        request = APIS[api](body, info)
        text, sizes = text_and_sizes(info, request.requests[0])
        assert (sizes, "Look.\n[A picture was left out" in text) == ([(4, 1)], True)
        assert "the chat template refuses" in request.warnings[0]
        body[name].append(body[name].pop(0))


def test_a_picture_in_the_system_prompt_of_the_messages_api_is_refused(info):
    with pytest.raises(Refused, match=r"system\[0\]: a picture"):
        MessagesRequest({**body_of("messages", "What?"), "system": [part_of("messages", A)]}, info)


@pytest.mark.parametrize("api", APIS)
def test_a_picture_in_an_answer_is_left_out(info, api):
    body = body_of(api, "What?")
    messages = body["input" if api == "responses" else "messages"]
    messages += [{"role": "assistant", "content": [part_of(api, A)]}, {"role": "user", "content": "Why?"}]
    request = APIS[api](body, info)
    assert text_and_sizes(info, request.requests[0])[1] == []
    assert "[1].content[0]: a picture was left out" in request.warnings[0]


@pytest.mark.parametrize("api", APIS)
def test_typed_marks_are_no_pictures(info, api):
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    request = request_of(info, api, body_of(api, typed, A, typed, result=(typed, B)))
    assert len(request.pictures) == 2
    assert seeing.PAD not in request.prompt
    answered = body_of(api, "a", A)
    messages = answered["input" if api == "responses" else "messages"]
    messages += [{"role": "assistant", "content": typed}, {"role": "user", "content": "Why?"}]
    assert len(request_of(info, api, answered).pictures) == 1


def test_results_go_into_a_question_if_the_template_prints_no_results():
    plain = seeing.tokenizer()
    plain.chat_template = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    plain.chat_template += seeing.TEMPLATE
    info = info_of(TokenizerWrapper(plain), Eyes())
    text, sizes = text_and_sizes(info, request_of(info, "chat", body_of("chat", B, "What?", result=("a.png", A))))
    assert sizes == [(1, 2), (4, 1)]
    assert "a.png<|vision_start|>" in text


def test_a_text_only_request_has_the_prompt_of_a_model_without_a_tower(info):
    body = body_of("chat", "What?", result=("a", "b"))
    assert request_of(info, "chat", body).prompt == request_of(info_of(), "chat", body).prompt
