"""The test of opposite pictures: the demo that reads pictures passes, with other features than its own it fails."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.cli.verify_tables import _sight
from mlx_mtp.lossless import check
from mlx_mtp.lossless.check import Verdict, conclude
from mlx_mtp.lossless.seeing import MISSES, PAIRS, drawn, seen
from mlx_mtp.pictures.prompt import opened

SIDES = [pair for pair in PAIRS if pair.kind == "sides"]
FEW = PAIRS if SWEEP else [*SIDES[:2], *PAIRS[6:8]]


def some_order(count):
    return mx.random.permutation(count, key=mx.random.key(0))


FAULTS = {
    "zeros": mx.zeros_like,
    "shuffled rows": lambda rows: rows[some_order(len(rows))],
    "reversed rows": lambda rows: rows[::-1],
    "shuffled columns": lambda rows: rows[:, some_order(rows.shape[1])],
    "noise": lambda rows: mx.random.normal(rows.shape, key=mx.random.key(int(mx.abs(rows).sum() * 1000))),
}


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load("demo-vision")


def spoilt(monkeypatch, model, features):
    """Replace the features of each picture by `features(own ones)`."""
    vision, own = model.vision, model.vision.features
    monkeypatch.setattr(vision, "stored", lambda picture: None)
    monkeypatch.setattr(vision, "features", lambda picture: features(own(picture)), raising=False)


def missed(model, tokenizer, pairs):
    return sum(count - right for right, count in seen(model, tokenizer, pairs).values())


def test_the_demo_sees(demo):
    kinds = [pair.kind for pair in FEW]
    assert seen(*demo, FEW) == {kind: (kinds.count(kind),) * 2 for kind in ("sides", "colours")}


@pytest.mark.parametrize("fault", sampled([*FAULTS][:4], FAULTS))
def test_wrong_features_fail(demo, monkeypatch, fault):
    spoilt(monkeypatch, demo[0], FAULTS[fault])
    assert missed(*demo, PAIRS if SWEEP else SIDES[:2]) > MISSES


def test_features_of_the_other_picture_fail(demo, monkeypatch):
    model, _ = demo
    other = {}
    for (colour, a), (_, b) in (pair.squares for pair in SIDES[:2]):
        pictures = opened(model, [drawn(colour, a), drawn(colour, b)])
        other |= zip(pictures, [model.vision.features(picture) for picture in reversed(pictures)], strict=True)
    monkeypatch.setattr(model.vision, "stored", other.get)
    assert missed(*demo, SIDES[:2]) == 2


@pytest.mark.parametrize(("right", "fails"), [(6, False), (5, False), (4, True), (0, True)])
def test_more_misses_than_allowed_are_a_fault(demo, right, fails):
    verdict = Verdict("float32", seen={"sides": (right, 6), "colours": (6, 6)})
    conclude(demo[0], verdict)
    assert (verdict.pairs_seen, verdict.pairs) == (right + 6, 12)
    assert [text for text in verdict.broken if f"sees {right + 6} of 12 opposite pairs" in text] == verdict.broken
    assert bool(verdict.broken) == fails


def test_the_line_names_the_kinds_and_what_is_tested():
    line = _sight(Verdict("float32", seen={"sides": (5, 6), "colours": (6, 6)}))
    assert line.startswith("sees: 11 of 12 opposite pairs of pictures (sides 5 of 6, colours 6 of 6)")
    assert "wiring" in line
    assert "not exactness" in line


def test_a_model_that_cannot_be_asked_about_pictures_is_a_warning(demo):
    """Text is still verified, for instance without a chat template or without Pillow."""
    model, tokenizer = demo
    plain, verdict = SimpleNamespace(has_chat_template=False, encode=tokenizer.encode), Verdict("float32")
    check._look(model, plain, verdict, lambda *_: None)
    assert verdict.seen == {}
    assert ["it was not tested whether the model sees: " in text for text in verdict.warnings] == [True]
    conclude(model, verdict)
    assert verdict.broken == []
