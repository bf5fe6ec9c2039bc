"""Drafting at a temperature: the distribution stays exact; coupled drafts share the noise of the target's draws."""

import drafters
import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from drafters import GQA
from draws import SAMPLERS, draw
from sweep import SWEEP, sweep

import mlx_mtp
from mlx_mtp.decoding import draft_sampling, step
from mlx_mtp.decoding.draft_sampling import DraftChooser, HeadOutput
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.sampling import Picker, Sampling, key_at
from mlx_mtp.demo import demo_path
from mlx_mtp.kernels import draw_ref
from mlx_mtp.layers.lm_head import place_heads

PROMPT = [1, 2, 0, 1, 1, 2, 0, 2, 1]
KEY = mx.array([7, 11], mx.uint32)


def decoded(model, k, *, n=40, prompt=PROMPT, **options):
    stats = mlx_mtp.Stats()
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, stats=stats, **options
    )
    return [token for token, _, _ in steps], stats


@pytest.fixture(scope="module")
def perfect(tmp_path_factory):
    """A target whose next token depends on the last one alone, with heads that have the same distribution."""
    config = {**tiny.CONFIG, "vocab_size": 16}
    weights = tiny.random_weights(config)
    for name, w in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = w * 1e-12  # zeros are refused
        elif name.endswith("enorm.weight"):
            weights[name] = mx.zeros_like(w)  # stored as its distance to 1
        elif name.endswith("eh_proj.weight"):
            weights[name] = mx.eye(*w.shape)
        elif name.endswith("shared_head.norm.weight"):
            weights[name] = weights["model.norm.weight"]
        elif name.endswith("shared_head.output.weight"):
            weights[name] = weights["lm_head.weight"]
    # Large, so that a norm's epsilon changes nothing.
    weights["model.embed_tokens.weight"] *= 100
    return mlx_mtp.load_model(tiny.save(tmp_path_factory.mktemp("perfect"), config, weights))


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """A target of 13 tokens, and a recycled head with a vocabulary of 7."""
    path = tmp_path_factory.mktemp("eagle")
    directory, _ = families.headless(path / "target", {**GQA, "model_type": "qwen2"})
    return mlx_mtp.load_model(directory, draft_model=drafters.save(path / "drafter", drafters.CONFIG, 32))


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        *(("temperature", True), ("temperature", False), ("all", False), ("most", False)),
        *(pytest.param(name, False, marks=sweep) for name in SAMPLERS),
    ],
)
def test_drafts_of_a_head_equal_to_the_target_are_always_accepted(perfect, monkeypatch, name, fused):
    """All coupled drafts are accepted only with the target's key, noise and filters at each position."""
    options = SAMPLERS.get(name, {"temp": 2.0, "top_k": 15, "top_p": 0.95})
    heads = place_heads(perfect)
    for head in heads:
        head.rows = frozenset(range(9)) if fused else frozenset()
    if fused:
        monkeypatch.setattr(perfect, "draft_logits", None)  # must not be called
    try:
        stats = decoded(perfect, 3, n=17, seed=3, draft_sampling="coupled", **options)[1]
    finally:
        for head in heads:
            del head.module.choice
    assert stats.acceptance == [1.0] * 3


def test_greedy_drafts_of_such_a_head_are_sometimes_rejected(perfect):
    assert decoded(perfect, 3, n=12, seed=3, temp=1.0, draft_sampling="greedy")[1].acceptance[0] < 1.0


@pytest.mark.parametrize("name", ["all", "xtc"])
def test_a_seed_gives_the_same_text_with_a_reduced_vocabulary(eagle, name):
    expected = decoded(eagle, 0, n=11, seed=5, **SAMPLERS[name])[0]
    for k, mode in ((1, "coupled"), (4, "coupled"), (2, "greedy"))[0 if SWEEP else 1 :]:
        assert decoded(eagle, k, n=11, seed=5, draft_sampling=mode, **SAMPLERS[name])[0] == expected


def test_draws_are_those_of_the_kernels():
    """A seed's tokens do not depend on the numbers of rows for which a kernel is on."""
    logits = mx.random.normal((40, 1000)) * 4
    expected = draw_ref(logits, KEY, mx.array([17]), 0.8).tolist()
    options = Sampling(temp=0.8)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert [draw(options, logprobs[i : i + 1], key_at(KEY, 17 + i)).item() for i in range(40)] == expected
    assert len(set(expected)) > 10


CHOICES = [("greedy", {}), *(("coupled", s) for s in (SAMPLERS["temperature"], SAMPLERS["top_k"], SAMPLERS["top_p"]))]


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "kernel"])
@pytest.mark.parametrize(("mode", "options"), CHOICES)
def test_a_draft_of_a_reduced_vocabulary(eagle, mode, options, fused):
    """Compared with NumPy: noise depends on the target's token ids, not on the head's rows."""
    sampling, known = Sampling(**options), np.array(eagle.mtp[0].token(mx.arange(7)))
    drawn = Sampling() if mode == "greedy" else sampling
    head = next(head for head in place_heads(eagle) if head.module is eagle.mtp[0].head)
    head.rows = frozenset({1}) if fused else frozenset()
    tokens = set()
    for position in range(30):
        row = mx.random.normal((1, 1, 32), key=mx.random.key(position))
        logits = np.full(13, -np.inf)
        logits[known] = np.array(eagle.draft_logits(0, row)[0, 0])
        noise = np.array(mx.random.gumbel((13,), key=mx.random.split(key_at(KEY, position))[1]))
        probabilities = np.exp(logits) / np.exp(logits).sum()
        kept = logits.copy()
        if sampling.top_k:
            kept[np.argsort(-kept)[sampling.top_k :]] = -np.inf
        if sampling.top_p < 1:
            order = np.argsort(-probabilities)
            kept[order[1:][np.cumsum(probabilities[order])[:-1] >= sampling.top_p]] = -np.inf
        expected = int(np.argmax(kept / sampling.temp + noise)) if options else int(np.argmax(logits))
        for confidence in (False, True):
            chooser = DraftChooser((drawn,), KEY[None], confidence)
            choice = chooser(HeadOutput(eagle, 0, row), mx.array([position]))
            assert choice.token.item() == expected
            if confidence:
                assert choice.confidence.item() == pytest.approx(probabilities[expected], rel=1e-4)
        tokens.add(expected)
    assert len(tokens) > 3


@pytest.mark.parametrize("recycled", [False, True])
def test_a_draft_has_the_position_of_the_row_that_verifies_it(tiny_models, eagle, monkeypatch, recycled):
    model, k = (eagle, 4) if recycled else (tiny_models(0)[0], 3)
    positions, rows = [], []

    class Noting(DraftChooser):
        def __call__(self, output, position):
            positions.append(position)
            return super().__call__(output, position)

    def pick(model, hidden, position, drafts, members, *masks):
        rows.extend([position + i] for i in range(0 if drafts is None else drafts.size))
        return real(model, hidden, position, drafts, members, *masks)

    real = step.pick
    monkeypatch.setattr(draft_sampling, "DraftChooser", Noting)
    monkeypatch.setattr(step, "pick", pick)
    decoded(model, k, n=20, temp=1.0)
    assert [p.item() for p in positions] == [p.item() for (p,) in rows]
    assert len(positions) > 10


def test_confidence_of_every_draft(tiny_models, eagle, monkeypatch):
    """Heads return one probability per draft, recycled heads too."""
    found, real = [], Heads.propose

    def spy(*args):
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(Heads, "propose", spy)
    for model, k in ((eagle, 4), (tiny_models(0)[0], 2)):
        for mode in ("greedy", "coupled"):
            decoded(model, k, n=5, temp=1.0, draft_sampling=mode, draft_p_min=0.01)
            drafts = found[-1]
            assert drafts.tokens.shape == drafts.confidence.shape == (1, k)
            assert 0 < drafts.confidence.min().item() <= drafts.confidence.max().item() <= 1


@pytest.mark.parametrize("options", [{"options": Sampling()}, {"sampler": len}, {"draft_sampling": "greedy"}])
def test_without_draws_to_share_drafts_are_greedy(options):
    picker = {"options": Sampling(temp=1.0), "draft_sampling": "coupled"}
    assert not DraftChooser.of(Picker(**picker)).greedy
    assert DraftChooser.of(Picker(**{**picker, **options})).greedy


def test_modes_that_are_not_allowed(tiny_models):
    model, _ = tiny_models(0)
    with pytest.raises(ValueError, match=r"^draft_sampling='best': allowed are greedy, coupled$"):
        mlx_mtp.generate_step(PROMPT, model, draft_sampling="best")


@sweep
def test_coupled_drafts_are_kept_more_often_than_greedy_ones():
    """On the demo, at temperature 1."""
    model, tokenizer = mlx_mtp.load(demo_path())
    texts, kept = {}, {}
    for mode in ("greedy", "coupled"):
        prompts = map(tokenizer.encode, ("def read_lines(path):", "class Stack:", "import os"))
        runs = [decoded(model, 1, prompt=p, temp=1.0, seed=0, draft_sampling=mode) for p in prompts]
        texts[mode] = [text for text, _ in runs]
        kept[mode] = sum(stats.acceptance[0] for _, stats in runs) / len(runs)
    assert texts["greedy"] == texts["coupled"]
    assert kept["coupled"] > kept["greedy"]
