"""Pictures that a request is refused for: broken, too large, too many, or without a mark in the prompt."""

import contextlib
import re
import struct

import pytest
import seeing
from mlx_lm.tokenizer_utils import TokenizerWrapper
from picture_requests import body_of, png, url_of
from starlette.requests import ClientDisconnect
from towerless import APIS, Eyes, info_of, request_of, text_and_sizes

from mlx_mtp.pictures.decoded import DecodedFiles
from mlx_mtp.serve import preparation, request_pictures
from mlx_mtp.serve.fields import Refused


@pytest.fixture
def info():
    return info_of(vision=Eyes())


A, B = png(16, 8, 10), png(8, 32, 20)


def image_url(url, **more):
    return "chat", {"type": "image_url", "image_url": {"url": url, **more}}


def source(**fields):
    return "messages", {"type": "image", "source": fields}


def header_of(width, height):
    return png(1, 1)[:16] + width.to_bytes(4) + height.to_bytes(4) + png(1, 1)[24:]


BROKEN = {
    "a path": (*image_url("/etc/passwd"), "data: URL"),
    "a file URL": (*image_url("file:///etc/passwd"), "data: URL"),
    "a web address": (*image_url("https://example.org/a.png"), "--fetch-images"),
    "a web address, in capitals": (*image_url("HTTP://example.org/a.png"), "--fetch-images"),
    "another scheme": (*image_url("ftp://example.org/a.png"), "data: URL"),
    "no base64": (*image_url("data:image/png;base64,!!!!"), "base64"),
    "base64 with points": (*image_url(url_of(A).replace("A", "A.")), "base64"),
    "a data URL of text": (*image_url("data:text/plain,hello"), "base64"),
    "text": (*image_url(url_of(b"hello world")), "not a PNG"),
    "a drawing": (*image_url(url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")), "not a PNG"),
    "nothing": (*image_url(url_of(b"")), "not a PNG"),
    "a truncated file": (*image_url(url_of(png(64, 64)[:60])), "damaged"),
    "a bomb": (*image_url(url_of(header_of(30000, 30000))), "900000000|900,000,000|30000 x 30000"),
    "a line": (*image_url(url_of(header_of(1, 4000))), "200 times"),
    "no pixels": (*image_url(url_of(header_of(0, 9))), "1 x 1"),
    "no url": ("chat", {"type": "image_url"}, "url is missing"),
    "a url that is no text": ("chat", {"type": "image_url", "image_url": {"url": 5}}, "a text"),
    "a detail": (*image_url(url_of(A), detail="tiny"), "detail='tiny'"),
    "a file id": ("responses", {"type": "input_image", "file_id": "file-1"}, "file_id"),
    "no data": ("responses", {"type": "input_image"}, "url is missing"),
    "Anthropic's path": (*source(type="url", url="/etc/passwd"), "data: URL"),
    "Anthropic's web address": (*source(type="url", url="http://localhost/a.png"), "--fetch-images"),
    "Anthropic's file": (*source(type="file", file_id="f"), "file_id"),
    "Anthropic's broken data": (*source(type="base64", media_type="image/png", data="?"), "base64"),
    "no source": ("messages", {"type": "image"}, "type base64 or url"),
    "a source that is a text": ("messages", {"type": "image", "source": "a.png"}, "object"),
}  # fmt: skip


@pytest.mark.parametrize("where", ["question", "result"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_picture_of_a_question_is_refused_and_of_a_result_left_out(info, name, where):
    api, part, reason = BROKEN[name]
    body = body_of(api, A, "What?", result=(B,))
    field = "input" if api == "responses" else "messages"
    result = body[field][-2]
    parts = {"question": body[field][-1]["content"], "result": result.get("output") or result["content"]}[where]
    (parts[0]["content"] if "tool_use_id" in parts[0] else parts).append(part)
    if where == "result":
        request = APIS[api](body, info)
        (warning,) = request.warnings
        assert re.match(rf"(?s){field}\[2\].*\[1\]: a picture was left out.*({reason})", warning)
        text, sizes = text_and_sizes(info, request.requests[0])
        assert (len(sizes), "[A picture was left out: " in text) == (2, True)
        return
    with pytest.raises(Refused, match=rf"(?s)^{field}\[\d\].content\[2\]: picture 3: .*({reason})") as refused:
        APIS[api](body, info)
    assert (refused.value.status, refused.value.param) == (400, field)
    assert len(str(refused.value)) < 300  # never the picture's bytes


def test_headers_of_all_pictures_are_checked_before_one_is_decoded(info):
    with pytest.raises(Refused, match="picture 2"):
        request_of(info, "chat", body_of("chat", A, header_of(30000, 30000)))
    assert info.vision.opened == []


def test_a_prompt_too_long_by_its_pictures_is_refused_before_one_is_decoded(info):
    with pytest.raises(Refused, match="prompt is too long: 30000 tokens") as refused:
        request_of(info_of(vision=info.vision, positions=20000), "chat", body_of("chat", *3 * [png(800, 800)]))
    assert (refused.value.code, info.vision.opened) == ("context_length_exceeded", [])


@pytest.mark.parametrize("api", APIS)
def test_at_most_twenty_pictures_are_allowed_in_a_question(info, api):
    assert len(request_of(info, api, body_of(api, *20 * [A])).pictures) == 20
    with pytest.raises(Refused, match="picture 21: more than 20 pictures"):
        APIS[api](body_of(api, *21 * [A]), info)


DROPS = "{% for m in messages %}{{ m.content if m.content is string else 'x' }}{% endfor %}"
TWICE = "{% for m in messages %}{% for p in m.content %}{{ '<|image_pad|><|image_pad|>' }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [DROPS, TWICE])
def test_a_template_without_a_mark_for_each_picture_is_refused(template):
    plain = seeing.tokenizer()
    plain.chat_template = template
    with pytest.raises(Refused, match="marks of pictures"):
        request_of(info_of(TokenizerWrapper(plain), Eyes()), "chat", body_of("chat", A))


def test_a_mark_from_a_variable_of_the_template_is_refused(info):
    plain = seeing.tokenizer()
    plain.chat_template = seeing.TEMPLATE + "{{ extra }}"
    seeing_info = info_of(TokenizerWrapper(plain), Eyes())
    body = {**body_of("chat", "What?"), "chat_template_kwargs": {"extra": "<|image_pad|>"}}
    with pytest.raises(Refused, match="1 marks of pictures for 0"):
        request_of(seeing_info, "chat", body)


def test_pixels_of_a_request_are_limited_before_any_is_decoded(info, monkeypatch):
    """Pictures that were decoded before do not count, so that a conversation that was accepted continues."""
    monkeypatch.setattr(request_pictures, "FILES", DecodedFiles())
    monkeypatch.setattr(request_pictures, "MOST_PIXELS", 300)
    small, others = png(10, 20, 1), [png(10, 10 + side, side) for side in range(3)]
    request_of(info, "chat", body_of("chat", small, "What?"))
    request_of(info, "chat", body_of("chat", small, others[0], "What?"))
    assert info.vision.opened == [(20, 10), (20, 10), (10, 10)]
    given = small, others[1], small, others[2], png(8, 16, 7)
    with pytest.raises(Refused, match=r"picture 2: 10 x 11 pixels; allowed are 300 in all pictures of a req") as e:
        request_of(info, "chat", body_of("chat", *given, "What?"))
    assert "\n" not in str(e.value)
    assert len(info.vision.opened) == 3
    body = body_of("chat", *given, "What?")
    body["messages"] += [{"role": "assistant", "content": "A."}, {"role": "user", "content": "Why?"}]
    assert request_of(info, "chat", body).pictures  # of the past the oldest is left out
    assert info.vision.opened[3:] == [(20, 10), (20, 10), (12, 10), (16, 8)]


def test_sizes_are_limited_by_format(info):
    for limit, form in ((25_000_000, "PNG"), (16_000_000, "WEBP")):
        for width, allowed in ((limit // 4000, True), (limit // 4000 + 1, False)):
            with pytest.raises(Refused) as e:
                request_of(info, "chat", body_of("chat", stated(form, width, 4000), "What?"))
            assert ("allowed are" in str(e.value)) != allowed
            assert ("WEBP" in str(e.value)) == (form == "WEBP")


def stated(form, width, height):
    """The header of a file without pixels."""
    if form == "PNG":
        return png()[:16] + struct.pack(">II", width, height) + png()[24:33]
    sides = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + sides


class Leaving:
    """The work of a request whose client leaves before the third check."""

    checks = 0

    @property
    def left(self):
        self.checks += 1
        return self.checks == 3


def test_a_request_that_waits_for_its_turn_or_decodes_can_be_ended(info, monkeypatch):
    monkeypatch.setattr(request_pictures, "FILES", DecodedFiles())
    monkeypatch.setattr(request_pictures, "TURN", 0.001)

    for held in (2, 0):
        work = Leaving()
        with contextlib.ExitStack() as stack:
            for _ in range(held):
                stack.enter_context(request_pictures.DECODING)
            token = preparation.CURRENT.set(work)
            with pytest.raises(ClientDisconnect):
                request_of(info, "chat", body_of("chat", png(40, 40, 3), "What?"))
            preparation.CURRENT.reset(token)
        assert work.checks == 3
    assert not info.vision.opened
    assert [request_pictures.DECODING.acquire(blocking=False) for _ in range(3)] == [True, True, False]
    for _ in range(2):
        request_pictures.DECODING.release()
