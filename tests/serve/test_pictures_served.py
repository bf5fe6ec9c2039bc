"""Pictures over HTTP: the APIs' answers are those of the engine, hostile pictures end no other answer."""

import mlx.core as mx
import pytest
import seeing
from compile_mode import NO_FUSE, set_mode
from picture_requests import PATHS, body_of, noise
from served import serving

import mlx_mtp
from mlx_mtp.serve.server import Loaded


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return seeing.build(tmp_path_factory.mktemp("seeing"))[0]


@pytest.fixture(scope="module")
def eyes(checkpoint):
    """A server of a tiny model that reads pictures."""

    def load():
        set_mode(NO_FUSE)
        with mx.stream(mx.cpu):
            return Loaded(*mlx_mtp.load(checkpoint), {}, {"kv_group_size": 32})

    with serving(load, raises=False) as client:
        yield client


@pytest.fixture(scope="module")
def model(checkpoint):
    return mlx_mtp.load(checkpoint)


def text_of(api, body):
    if api == "chat":
        return body["choices"][0]["message"]["content"]
    if api == "messages":
        return "".join(block.get("text", "") for block in body["content"])
    return "".join(part["text"] for item in body["output"] for part in item["content"])


def ask(eyes, api, *parts, **more):
    body = {**body_of(api, *parts, **more), "temperature": 0}
    found = eyes.post(PATHS[api], json=body)
    assert found.status_code == 200, found.text
    return text_of(api, found.json())


def rendered(parts):
    marks = ["<|vision_start|><|image_pad|><|vision_end|>" if isinstance(part, bytes) else part for part in parts]
    return f"<|im_start|>user\n{''.join(marks)}<|im_end|>\n<|im_start|>assistant\n"


ASKED = {
    "none": ("What?",),
    "one": (noise(1), "What?"),
    "two": ("a", noise(2), noise(3, 24, 40)),
    "three": (noise(4, 16, 8), noise(1), "x", noise(5, 8, 32)),
}


@pytest.mark.parametrize("name", ASKED)
def test_all_apis_answer_with_the_text_that_python_generates(eyes, model, name):
    parts = ASKED[name]
    images = [part for part in parts if isinstance(part, bytes)]
    expected = mlx_mtp.generate(*model, rendered(parts), max_tokens=8, images=images, num_draft_tokens=0)
    assert [ask(eyes, api, *parts) for api in PATHS] == [expected] * len(PATHS)


def test_another_picture_is_another_answer(eyes):
    texts = {ask(eyes, "chat", noise(seed), "What?") for seed in range(4)}
    assert len(texts) > 1
