"""Compare the PyTorch program that makes SmolLM2's head with `mlx_mtp.training`, on a tiny target and head."""

import itertools

import families
import mlx.core as mx
import numpy as np
import pytest
from drafters import HEADLESS
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.training import heads, measure
from mlx_mtp.training.batches import Batch
from mlx_mtp.training.chain import ChainCache
from mlx_mtp.training.chain import chain as mlx_chain
from mlx_mtp.training.loss import chain_loss
from mlx_mtp.training.reading import read as mlx_read
from mlx_mtp.training.recording import Recording

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")

from bench.smollm2_head import chain, network, prompts, target, train, write  # noqa: E402 (they need PyTorch)
from bench.smollm2_head.markup import Markup  # noqa: E402

V, LENGTHS, ANSWER, DRAFTED = 13, (40, 3, 57, 28), 6, [0, 2, 3, 5, 7, 8, 11]
OFTEN = 3, 7  # tokens that the target chooses often
CONFIG = {**HEADLESS["llama_sliding"], "layer_types": None, "head_dim": 8, "tie_word_embeddings": True}
MARKUP = Markup(opening=[1, 4], answer=[6, 5], question=[6, 4], close=2, special=[0, 1, 2])


def converted(parameters) -> dict:
    return {name: torch.tensor(np.array(w)) for name, w in tree_flatten(parameters)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a workshop with a new head, the same target in PyTorch, and the same head."""
    model = mlx_mtp.load_model(
        families.headless(tmp_path_factory.mktemp("tiny"), CONFIG)[0], kernels="off", mtp=False
    )
    often = mx.array([3.0 if token in OFTEN else 1.0 for token in range(V)])
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * often[:, None]
    weights = converted(model.model.parameters())
    workshop = heads.new(model, DRAFTED, chain.DEPTHS, None, mx.float32)
    eh_proj = workshop.trained.mtp[0].eh_proj
    eh_proj.weight = eh_proj.weight + 0.3 * mx.random.normal(eh_proj.weight.shape, key=mx.random.key(1))
    names = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"
    sizes = network.Sizes(*(CONFIG[name] for name in (*names, "rms_norm_eps", "rope_theta", "vocab_size")))
    twin = target.Target(weights, sizes, sum(LENGTHS), torch.float32, torch.device("cpu"))
    return workshop, twin, converted(workshop.trained.mtp[0].trainable_parameters())


@pytest.fixture(scope="module")
def documents():
    return [np.random.default_rng(i).integers(0, V, n).tolist() for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reading(pair, documents):
    """Return the reading of one row in which all documents are joined."""
    starts = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)
    answers = torch.cat([torch.arange(n) >= ANSWER for n in LENGTHS])
    tokens = torch.tensor([*itertools.chain(*documents)])
    return chain.read(pair[1], write.Written(*(part[None] for part in (tokens, torch.tensor(starts), answers))))


def test_masks(reading):
    for depth, mask in enumerate(chain.masks(reading.starts)):
        cache = ChainCache(mx.array(reading.starts.numpy()), None, depth, [], recycled=True)
        np.testing.assert_array_equal(mask, cache.make_mask(sum(LENGTHS)))


def test_rows_of_the_target_and_of_each_depth(pair, documents, reading):
    """A document's rows are those that MLX computes for the document alone."""
    workshop, model, head = pair
    outputs, first = chain.chain(model, head, reading, reading.hidden), 0
    for tokens in documents:
        here = slice(first, first + len(tokens) - 1)
        hidden, choices = mlx_read(workshop.model, tokens)
        rows = workshop.model.capture(hidden[None, :-1])
        np.testing.assert_allclose(reading.hidden[:, here], rows, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(reading.choices[0, first : first + len(tokens)], choices)
        starts = mx.zeros(rows.shape[:2], mx.int32)
        theirs = mlx_chain(workshop.model, rows, mx.array([tokens[1:]]), starts, chain.DEPTHS)
        for depth, output in enumerate(theirs):
            normed = np.array(workshop.trained.mtp[0].norm(output))[0, depth:]
            np.testing.assert_allclose(outputs[depth][0, here][depth:], normed, rtol=1e-4, atol=1e-4)
        first += len(tokens)


def test_right_drafts_position_by_position(pair, documents, reading, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "BLOCK", 1)
    workshop, model, head = pair
    recording = Recording(tmp_path / "recording", {}, CONFIG["hidden_size"])
    for tokens in documents:
        recording.append(tokens, *mlx_read(workshop.model, tokens), min(ANSWER, len(tokens)), held=True)
    drafted = train.drafted_of(model, torch.tensor(DRAFTED))
    found, total = chain.hits(model, head, drafted, reading), np.zeros(1 + chain.DEPTHS)
    for document in recording.documents:
        expected = measure.counts_of(workshop.model, recording, document, chain.DEPTHS)
        end = document.end - chain.DEPTHS
        if end > document.first:
            np.testing.assert_array_equal(found[0, document.first : end], expected)
        assert not found[0, max(end, document.first) : document.end].any()
        total += expected.sum(axis=0)
    assert total.all()
    acceptance = train.measure(model, head, drafted, reading)
    np.testing.assert_allclose(acceptance.depths, total[1:] / total[:-1], atol=1e-4)
    assert acceptance.cycle == pytest.approx(total.sum() / total[0], abs=1e-3)


def test_the_loss(pair, documents, reading):
    workshop, model, head = pair
    hidden, choices = map(mx.concatenate, zip(*(mlx_read(workshop.model, t) for t in documents), strict=True))
    starts, tokens = mx.array(reading.starts[0].int().numpy()), mx.array([*itertools.chain(*documents)])
    rows = (a[None] for a in (hidden, tokens, choices, starts, mx.ones(tokens.shape, mx.bool_), mx.random.key(0)))
    how = {"model": workshop.model, "teacher": workshop.teacher, "ranks": workshop.ranks, "depths": chain.DEPTHS}
    expected, report = chain_loss(workshop.trained, *Batch(*rows), **how)
    found, right = chain.loss(model, head, train.drafted_of(model, torch.tensor(DRAFTED)), reading, 0.0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    np.testing.assert_allclose(right, report[0], atol=1e-6)


def test_a_new_head_is_that_of_tune_heads(pair, reading):
    workshop, model, _ = pair
    fresh = heads.new(workshop.model, DRAFTED, chain.DEPTHS, None, mx.float32)
    heads.set_scale(fresh, mx.array(reading.hidden[0, 1:].numpy()))
    expected = dict(tree_flatten(fresh.trained.mtp[0].trainable_parameters()))
    fresh.restore()
    found = train.new_head(model, reading.hidden[0, 1:])
    assert found.keys() == expected.keys()
    for name, w in found.items():
        np.testing.assert_allclose(w, expected[name], rtol=1e-5, err_msg=name)


def test_written_answers_are_the_targets_choices(pair):
    """Greedy answers are what the target chooses when it reads the rows; conversations begin and end as stated."""
    _, model, _ = pair
    torch.manual_seed(0)
    prompts = torch.tensor([[1, 4, 7, 9, 2, 6, 5], [1, 4, 8, 2, 6, 5, -1]])
    recipe = write.TRAINING._replace(sampled=0.0, shortest=5, longest=9)
    written = write.write(model, MARKUP, prompts, recipe, rows=6, length=72)
    reading = chain.read(model, written)
    chosen = written.answers[:, 1:]
    own = reading.tokens[:, 1:]
    special = torch.isin(reading.choices[:, :-1], torch.tensor(MARKUP.special))
    expected = torch.where(special, MARKUP.close, reading.choices[:, :-1])
    assert chosen.sum() > 50
    assert (own == expected)[chosen].all()
    begins = reading.starts == torch.arange(72)
    assert begins.sum() > 12
    assert (reading.tokens[begins] == MARKUP.opening[0]).all()
    assert (reading.tokens[:, :-1][begins[:, 1:]] == MARKUP.close).all()


def test_training_raises_the_share_of_right_drafts(pair, reading, monkeypatch):
    monkeypatch.setattr(train, "REPORT_EVERY", 10)
    monkeypatch.setattr(train, "WARMUP", 1)
    torch.manual_seed(0)
    found, drafted = [], train.drafted_of(pair[1], torch.tensor(DRAFTED))
    budget = train.Budget(0, steps=30)
    head = train.train(pair[1], drafted, reading, 4, budget, lambda *given: found.append(given))
    assert [step for step, *_ in found] == [10, 20, 30]
    assert np.mean(found[-1][1]) > np.mean(found[0][1]) + 0.1
    first, last = (
        chain.loss(pair[1], each, drafted, reading, 0.0)[0]
        for each in (train.new_head(pair[1], reading.hidden), head)
    )
    assert last < 0.9 * first


def test_prompts_of_the_training_are_not_measured():
    held_out = prompts.draw(200, prompts.TEST_QUESTIONS, seed=1, held_out=True)
    excluded = {*prompts.TEST_QUESTIONS, *held_out, *prompts.draw(100, (), seed=2, held_out=False)}
    training = prompts.draw(200, excluded, seed=2, held_out=False)
    assert len({*held_out, *training}) == 400
    assert not excluded & {*training}
    tasks = [task for task in prompts.LISTS["tasks"] if prompts.held(task, 0)]
    assert tasks
    assert not [prompt for prompt in training for task in tasks if task in prompt]
