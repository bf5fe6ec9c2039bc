"""Check that the demo that reads pictures sees: opposite pictures, each with its own answer, drafted or not."""

import random
import re

import mlx.core as mx
import pytest
from served import settings
from sweep import SWEEP
from train_seeing import card, scenes
from train_seeing.answers import right_answers

import mlx_mtp
from bench.picture_drafts import accepted
from mlx_mtp.decoding.memory_needs import stated_positions
from mlx_mtp.demo import demo_vision_path
from mlx_mtp.pictures.image import open_image
from mlx_mtp.serve.server import Loaded, described, shared
from mlx_mtp.session import ChatSession

PLAIN = {"num_draft_tokens": 0}
BYTES = 2_000_000  # of the checkpoint's weights, at most


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load("demo-vision")


def answer(demo, scenes_shown, question, *, seed=0, **options):
    model, tokenizer = demo
    rng = random.Random(seed)
    images = [scenes.render(scene, 96, 96, rng) for scene in scenes_shown]
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    return mlx_mtp.generate(model, tokenizer, prompt, images=images, max_tokens=60, **options).strip()


def opposites():
    """Pairs of pictures that differ in one property, with a question about it and the two right answers."""
    for left, right in (("left", "right"), ("top", "bottom")):
        pair = [(scenes.Thing("square", "red", side),) for side in (left, right)]
        yield "Where is the square?", pair, [f"The square is {scenes.PLACES[side]}." for side in (left, right)]
    for one, other in (("red", "blue"), ("green", "yellow"), ("black", "purple")):
        pair = [(scenes.Thing("square", colour, "left"),) for colour in (one, other)]
        yield "What colour is the square?", pair, [f"The square is {colour}." for colour in (one, other)]
    pair = [(scenes.Thing(shape, "red", "left"),) for shape in ("square", "triangle")]
    yield "What do you see?", pair, [f"{scenes.described(scene)}." for scene in pair]


@pytest.mark.parametrize(("question", "pair", "answers"), list(opposites()))
def test_opposite_pictures_have_their_own_answers(demo, question, pair, answers):
    """A model that does not see gives both pictures the same answer."""
    for scene, right in zip(pair, answers, strict=True):
        found = answer(demo, [scene], question)
        assert found == right
        assert found == answer(demo, [scene], question, **PLAIN)


def test_a_blind_model_fails(demo, monkeypatch):
    """Features of zeros: the answers of a pair are then the same, so that one of them is wrong."""
    model, _ = demo
    monkeypatch.setattr(type(model.vision), "features", lambda vision, picture: mx.zeros((picture.rows, 96)))
    monkeypatch.setattr(type(model.vision), "stored", lambda vision, picture: None)
    question, pair, _ = next(opposites())
    assert answer(demo, [pair[0]], question) == answer(demo, [pair[1]], question)


def test_two_pictures_and_none(demo):
    first, second = (scenes.Thing("square", "red", "left"),), (scenes.Thing("circle", "blue", "top"),)
    found = answer(demo, [first, second], "Compare the two pictures.")
    assert found == f"First picture: {scenes.described(first)}. Second picture: {scenes.described(second)}."
    assert answer(demo, [], "Describe the picture.") == scenes.NO_PICTURE


def test_the_example_is_described_as_the_card_states(demo):
    model, tokenizer = demo
    card = (demo_vision_path() / "README.md").read_text()
    parts = [{"type": "image"}, {"type": "text", "text": "What do you see?"}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    image = open_image(demo_vision_path() / "example.png")
    assert mlx_mtp.generate(model, tokenizer, prompt, images=[image], max_tokens=60).strip() in card


def test_the_card_is_written_by_the_training(tmp_path):
    """It has all figures of the shipped one, the number of right answers included."""
    shipped = (demo_vision_path() / "README.md").read_text()
    answers = int(re.search(r"100 other drawn pictures (\d+) were right", shipped)[1])
    card.write(tmp_path, parameters=831_472, steps=2750, minutes=103.2, right=[0.99] * 3, answers=answers)
    assert (tmp_path / "README.md").read_text() == shipped
    if SWEEP:
        assert right_answers("demo-vision") == answers
    else:
        assert right_answers("demo-vision", count=4) >= 2


def test_features_make_better_drafts_than_marks_or_equal_ones(demo):
    """Whatever the heads read at rows of pictures, the texts are equal; the card has the shares on 100 pictures."""
    features, marks = (accepted(demo, count=4, features=features) for features in (True, False))
    assert features.texts == marks.texts
    assert features.drafted > 0
    assert marks.drafted > 0


def test_its_context_is_that_of_the_text_config(demo):
    """config.json of a model that sees has the sizes of its language model in text_config."""
    model, tokenizer = demo
    assert ChatSession(model, tokenizer).positions == stated_positions(model) == 2048
    loaded = Loaded(model, tokenizer, {}, {})
    info = described(loaded, shared(loaded, settings()), settings())
    assert info.positions == 2048


def test_it_is_small():
    assert (demo_vision_path() / "model.safetensors").stat().st_size < BYTES
