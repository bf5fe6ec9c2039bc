"""Pictures over HTTP: the APIs' answers are those of the engine, hostile pictures end no other answer."""

import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from held_pictures import asked_beside_another
from picture_requests import PATHS, base64_of, body_of, noise
from PIL import Image
from served import settings
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding.memory_needs import LONGEST
from mlx_mtp.pictures import decoded
from mlx_mtp.serve.job import End, RequestFailed
from mlx_mtp.serve.server import Loaded, described


@pytest.fixture(scope="module")
def model(seeing_checkpoint):
    return mlx_mtp.load(seeing_checkpoint)


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


@pytest.mark.parametrize("name", sampled(["two", "three"], ASKED))
def test_all_apis_answer_with_the_text_that_python_generates(eyes, model, name):
    parts = ASKED[name]
    images = [part for part in parts if isinstance(part, bytes)]
    expected = mlx_mtp.generate(*model, rendered(parts), max_tokens=8, images=images, num_draft_tokens=0)
    assert [ask(eyes, api, *parts) for api in PATHS] == [expected] * len(PATHS)


def test_ollamas_api_answers_with_the_text_of_chat_completions(eyes):
    expected = ask(eyes, "chat", noise(1), noise(2), "What?")
    images, more = [base64_of(noise(1)), base64_of(noise(2))], {"stream": False, "options": {"num_predict": 8}}
    more["options"]["temperature"] = 0
    asked = {"role": "user", "content": "What?", "images": images}
    found = eyes.post("/api/chat", json={"messages": [asked], **more}).json()
    assert found["message"]["content"] == expected
    found = eyes.post("/api/generate", json={"prompt": "What?", "images": images, **more}).json()
    assert found["response"] == expected
    assert "vision" in eyes.post("/api/show", json={"model": "eyes"}).json()["capabilities"]


def test_another_picture_is_another_answer(eyes):
    texts = {ask(eyes, "chat", noise(seed), "What?") for seed in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("api", PATHS)
def test_a_picture_of_a_tool_is_read(eyes, api):
    answers = [ask(eyes, api, "What?", result=("a.png", noise(seed))) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_counted_tokens_are_those_of_the_answer(eyes):
    body = body_of("messages", noise(1), "What?", result=(noise(2), "b"))
    counted = eyes.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    usage = eyes.post(PATHS["messages"], json=body).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.fixture
def encoded(eyes, monkeypatch):
    """The grids of the pictures that are encoded."""
    vision, found = eyes.service.engine.served.model.vision, []
    stages = vision.stages
    monkeypatch.setattr(vision, "stages", lambda picture: found.append(picture.grid) or stages(picture))
    return found


def test_three_pictures_in_five_prompts_are_encoded_three_times(eyes, encoded):
    a, b, c = (noise(seed, 32 + 8 * seed, 16) for seed in (11, 12, 13))
    cached = []
    for parts in [(a, "1"), (a, b, "2"), (a, b, "3"), (b, "4"), (c, a, b, "5")]:
        found = eyes.post(PATHS["chat"], json={**body_of("chat", *parts), "temperature": 0}).json()
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert len(encoded) == len(set(encoded)) == 3
    assert cached[2] > cached[1] > 30  # the rows of `a`, then those of both


def test_a_lost_prefix_needs_no_tower_and_lost_features_no_prefix(eyes, encoded):
    served = eyes.service.engine.served
    first = ask(eyes, "chat", noise(21), "What?")
    served.tree.clear()
    assert ask(eyes, "chat", noise(21), "What?") == first
    assert len(encoded) == 1
    served.model.vision.keep_at_most(0)
    try:
        other = ask(eyes, "chat", noise(22), "What?")
        assert ask(eyes, "chat", noise(22), "What?") == other
        assert len(encoded) == 2
        served.tree.clear()
        assert ask(eyes, "chat", noise(22), "What?") == other
        assert len(encoded) == 3
    finally:
        served.model.vision.keep_at_most(1 << 28)


def test_another_answer_advances_while_a_picture_is_prepared(eyes, monkeypatch):
    """The preparation waits for three more events of the other answer, which the engine's thread sends."""
    advanced, answer, response = asked_beside_another(eyes, monkeypatch, stream=True, return_progress=True)
    assert advanced == [True]
    assert not any(isinstance(event, End | RequestFailed) for event in answer)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    done = [event["prompt_progress"]["processed"] for event in events if "prompt_progress" in event]
    assert done == sorted(set(done)) != []


def test_a_picture_that_is_sent_again_is_not_decoded_again(eyes, monkeypatch):
    first = ask(eyes, "chat", noise(23), "What?")
    monkeypatch.setattr(decoded, "open_image", lambda *_, **__: pytest.fail("decoded again"))
    for api in PATHS:
        assert ask(eyes, api, noise(23), "What?") == first


def test_a_context_that_nothing_states_is_limited(eyes, monkeypatch):
    """Transformers' tokenizers then state 10**30 tokens, which no request without max_tokens could have."""
    served = eyes.service.engine.served
    assert served.tokenizer.model_max_length > LONGEST
    monkeypatch.delitem(served.model.args.text_config, "max_position_embeddings")
    assert described(Loaded(*served[:2], {}, {}), served, settings()).positions == LONGEST


def damaged(draw, kind):
    """A picture's file that is cut, changed in places, or continued; perhaps still a valid one."""
    file = io.BytesIO()
    picture = Image.frombytes("RGB", (24, 16), draw.randbytes(3 * 24 * 16))
    picture.save(file, kind)
    data = bytearray(file.getvalue())
    for _ in range(draw.choice([0, 1, 1, 4])):
        data[draw.randrange(min(len(data), draw.choice([40, 10**6])))] = draw.randrange(256)
    cut = draw.choice([len(data), len(data), draw.randrange(len(data))])
    return bytes(data[:cut]) + draw.randbytes(draw.choice([0, 0, 9]))


def test_damaged_pictures_are_answered_or_refused_beside_other_answers(eyes):
    draw, body = random.Random(7), {**body_of("chat", noise(31), "Write."), "temperature": 0, "max_tokens": 24}
    expected = eyes.post(PATHS["chat"], json=body).json()["choices"]
    statuses = []
    with ThreadPoolExecutor(1) as pool:
        for round in range(12 if SWEEP else 3):
            other = pool.submit(eyes.post, PATHS["chat"], json=body)
            for kind in ("PNG", "JPEG", "WEBP", "GIF"):
                api = draw.choice([*PATHS])
                asked = {**body_of(api, damaged(draw, kind), "What?"), "stream": bool(round % 2)}
                found = eyes.post(PATHS[api], json=asked)
                statuses.append(found.status_code)
                assert found.status_code in (200, 400), (kind, found.text)
                if found.status_code == 400:
                    assert "picture 1" in found.json()["error"]["message"]
            assert other.result().json()["choices"] == expected
    assert {200, 400} <= set(statuses)


def test_a_refused_picture_names_the_model_and_not_its_path(one_layer):
    """The reason begins with the path of the checkpoint's directory."""
    served = one_layer.service.engine.served
    path = served.model.runtime.blind.partition(": ")[0]
    assert Path(path).is_dir()
    for api, url in PATHS.items():
        refused = one_layer.post(url, json=body_of(api, noise(3), "What?"))
        assert refused.status_code == 400
        assert "pictures are not read here: demo: model_type" in refused.text
        assert path not in refused.text
