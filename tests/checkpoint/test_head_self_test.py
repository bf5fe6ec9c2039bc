"""Test the heads' self-test at load: the agreement is correct, and heads with low agreement are a warning."""

import json
import shutil
import warnings

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx_lm.models.base import create_causal_mask
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint import head_self_test
from mlx_mtp.checkpoint.head_self_test import MIN_AGREEMENT, WORDS, agreement, random_tokens
from mlx_mtp.demo import demo_path

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load(demo_path())


def test_the_share_is_counted_right(demo):
    """The share equals that of the first head and the target without caches."""
    model, tokenizer = demo
    tokens = tokenizer.encode(WORDS)[:60]
    x = model.model.embed_tokens(mx.array(tokens)[None])
    for layer, window in zip(model.layers, model.windows(), strict=True):
        x = layer(x, create_causal_mask(len(tokens), window_size=window), None)
    targets = mx.argmax(model.logits(x)[0], axis=-1).tolist()
    head = model.mtp[0]
    fused = mx.concatenate([head.enorm(model.embed(mx.array(tokens)[None, 1:])), head.hnorm(x[:, :-1])], axis=-1)
    rows = head.block(head.eh_proj(fused), create_causal_mask(len(tokens) - 1, window_size=head.window), None)
    drafts = mx.argmax(model.draft_logits(0, rows)[0], axis=-1).tolist()
    accepted = [draft == target for draft, target in zip(drafts, targets[1:], strict=True)]
    assert agreement(model, tokens) == pytest.approx(sum(accepted) / len(accepted))
    assert 0.2 < sum(accepted) / len(accepted) < 1


def test_in_the_report_without_a_warning(demo):
    model, _ = demo
    (random, by_chance), (words, of_words) = model.report.agreement
    assert (random, words) == ("random tokens", "words")
    assert min(by_chance, of_words) > 10 * MIN_AGREEMENT
    assert f"agrees with the target on {by_chance:.0%} of random tokens, {of_words:.0%} of words" in str(model.report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mlx_mtp.load_model(demo_path())
    assert random_tokens(2048) == random_tokens(2048)


def test_draws_no_random_numbers(demo):
    mx.random.seed(7)
    expected = mx.random.uniform().item()
    mx.random.seed(7)
    agreement(demo[0], random_tokens(100))
    assert mx.random.uniform().item() == expected


@pytest.mark.parametrize("overrides", sampled([{"fuse": "he"}], [{"fuse": "he"}, {"head": "shared"}]))
def test_wrong_wiring_is_visible(overrides):
    with pytest.warns(UserWarning, match=r"the first head agrees with the target on .* of words; expect no speed-up"):
        mlx_mtp.load(demo_path(), mtp_overrides=overrides)


def test_norms_converted_wrongly_are_visible(tmp_path):
    """The heads' norms are stored one too small, in a checkpoint with a conversion's metadata."""
    path = tmp_path / "demo"
    shutil.copytree(demo_path(), path)
    (file,) = path.glob("model*.safetensors")
    weights = dict(mx.load(str(file)))
    layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    raw = {name: w for name, w in weights.items() if name.startswith(f"model.layers.{layers}.") and "norm" in name}
    assert len(raw) == 7
    file.unlink()
    mx.save_safetensors(str(file), weights | {name: w - 1 for name, w in raw.items()})
    with pytest.warns(UserWarning, match="the first head agrees with the target on"):
        mlx_mtp.load(path)


def test_not_where_weights_stay_on_disk():
    assert mlx_mtp.load_model(demo_path(), lazy=True).report.agreement == ()


@pytest.fixture
def put_off(monkeypatch):
    """Make a model of any size too large to be tested during the load."""
    monkeypatch.setattr(head_self_test, "AT_LOAD", 0)


def first_draft(model, k=2):
    return [token for token, *_ in mlx_mtp.generate_step([1, 2, 3], model, max_tokens=3, num_draft_tokens=k)]


def test_of_a_large_model_before_the_first_draft(put_off, demo):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = mlx_mtp.load(demo_path(), mtp_overrides={"head": "shared"})
    assert (model.report.untested, model.report.agreement) == (True, ())
    assert "before the first draft, when the heads' weights are read and checked" in str(model.report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_draft(model, 0)
    with pytest.warns(UserWarning, match=r"the first head agrees with the target on .* of words; expect no speed-up"):
        assert first_draft(model) == first_draft(demo[0])
    assert [kind for kind, _ in model.report.agreement] == ["words"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_draft(model)


@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_a_type_does_not_decide_what_is_large(monkeypatch, width):
    """Arithmetic takes a CPU as long in any type, so the number of weights decides: 2^13 and a few in the norm."""
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False), nn.RMSNorm(64))
    if width < 16:
        nn.quantize(model, group_size=32, bits=width)
    else:
        model.set_dtype({32: mx.float32, 16: mx.bfloat16}[width])
    for least, large in ((8192, True), (8192 + 64, False)):
        monkeypatch.setattr(head_self_test, "AT_LOAD", least)
        assert head_self_test.is_large(model) == large


def test_damage_of_heads_that_were_put_off(put_off, tmp_path):
    weights = tiny.random_weights(tiny.CONFIG)
    name = "model.layers.5.hnorm.weight"
    path = tiny.save(tmp_path, tiny.CONFIG, weights | {name: weights[name] * mx.nan})
    model = mlx_mtp.load_model(path)
    first_draft(model, 0)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"tensor {name} holds NaN, expected trained weights"):
            first_draft(model)


@pytest.mark.parametrize(
    ("words", "warned", "advised"), [(0.09, True, True), (0.2, False, True), (0.5, False, False)]
)
def test_heads_with_low_agreement(monkeypatch, words, warned, advised):
    """Damaged heads still draft frequent tokens of a text, and the last one of random tokens."""
    shares = {head_self_test.RANDOM_TOKENS: 0.3}
    monkeypatch.setattr("mlx_mtp.checkpoint.load.self_test", head_self_test.self_test)
    monkeypatch.setattr(head_self_test, "agreement", lambda model, tokens: shares.get(len(tokens), words))
    with warnings.catch_warnings(record=True) as caught:
        model, _ = mlx_mtp.load(demo_path())
    assert bool(caught) == warned
    assert ("mlx-mtp verify-lossless" in str(model.report)) == advised
