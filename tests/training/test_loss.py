"""The loss, its gradients and the measure are those of drafts in decoding."""

from functools import partial

import families
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafters import HEADLESS
from mlx.utils import tree_flatten, tree_map

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.training import heads, measure
from mlx_mtp.training.batches import Batch
from mlx_mtp.training.chain import chain
from mlx_mtp.training.heads import rounded
from mlx_mtp.training.loss import chain_loss, noisy
from mlx_mtp.training.reading import read
from mlx_mtp.training.recording import Recording


def demo(_folder):
    return heads.existing(mlx_mtp.load_model(demo_path(), kernels="off"), mx.float32)


def new(folder):
    config = {**HEADLESS["llama_sliding"], "num_hidden_layers": 2}
    model = mlx_mtp.load_model(families.headless(folder, config)[0], kernels="off", mtp=False)
    return heads.new(model, list(range(0, 13, 2)), 3, None, mx.float32)


SHOPS = {"chained": demo, "recycled": new}


@pytest.fixture(params=SHOPS)
def workshop(request, tmp_path):
    return SHOPS[request.param](tmp_path)


def packed(model, lengths) -> Batch:
    """Return one row with documents of random tokens, which the target has read one by one."""
    documents = [np.random.default_rng(i).integers(0, 13, n).tolist() for i, n in enumerate(lengths)]
    hidden, choices = map(mx.concatenate, zip(*(read(model, tokens) for tokens in documents), strict=True))
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32)
    tokens = mx.array([token for tokens in documents for token in tokens])
    counted = mx.array(np.arange(len(starts)) >= 5)
    return Batch(*(a[None] for a in (hidden, tokens, choices, mx.array(starts), counted, mx.random.key(0))))


def outputs(workshop, batch: Batch) -> list[np.ndarray]:
    """Return the outputs [L, H] of each depth for the one row of a batch."""
    rows = workshop.model.capture(batch.hidden[:, :-1])
    found = chain(workshop.model, rows, batch.tokens[:, 1:], batch.starts[:, :-1], workshop.depths)
    return [np.array(each[0]) for each in found]


def test_packed_documents_do_not_see_each_other(workshop):
    lengths = 9, 14, 4, 11
    together, first = outputs(workshop, packed(workshop.model, lengths)), 0
    for i, length in enumerate(lengths):
        part = packed(workshop.model, lengths[: i + 1])
        alone = part._replace(**{n: getattr(part, n)[:, first:] for n in ("hidden", "tokens", "choices", "counted")})
        alone = alone._replace(starts=mx.zeros_like(alone.tokens))
        for depth, expected in enumerate(outputs(workshop, alone)):
            found = together[depth][first : first + length - 1]
            np.testing.assert_allclose(found[depth:], expected[depth:], rtol=1e-4, atol=1e-4)
        first += length


def test_the_loss_counts_drafts_inside_a_document_that_the_target_chose(workshop):
    """Each depth's share and loss are those of its outputs, computed draft by draft."""
    model, lengths = workshop.model, (9, 14, 4, 11)
    batch = packed(model, lengths)
    how = {"model": model, "teacher": workshop.teacher, "ranks": workshop.ranks, "depths": workshop.depths}
    total, report = chain_loss(workshop.trained, *batch, **how)
    ends, weights = np.cumsum(lengths), 0.7 ** np.arange(workshop.depths)
    for depth, rows in enumerate(outputs(workshop, batch)):
        right, losses = [], []
        for i, row in enumerate(rows):
            end = ends[np.searchsorted(ends, i, side="right")]
            if i + 1 >= end or i - depth < end - lengths[list(ends).index(end)] or i + 1 < 5:
                continue
            number, choice = min(depth, len(model.mtp) - 1), batch.choices[0, i + 1].item()
            logits = model.draft_logits(number, mx.array(row)[None, None])[0, 0]
            right.append(model.mtp[number].token(mx.argmax(logits)).item() == choice)
            theirs = mx.softmax(workshop.teacher(model.normed(batch.hidden[:, i + 1]))[0])
            if (rank := workshop.ranks[choice].item()) >= 0:
                ours = logits - mx.logsumexp(logits)
                losses.append((-(theirs * ours).sum() / 2 - ours[rank] / 2).item())
        np.testing.assert_allclose(report[:, depth].tolist(), [np.mean(right), np.mean(losses)], rtol=1e-3)
    np.testing.assert_allclose(total.item(), (np.array(report[1]) * weights).sum() / weights.sum(), rtol=1e-5)


def test_noise_is_a_share_of_each_row_and_depends_on_the_key(workshop):
    rows = mx.random.normal((2, 5, 4096)) * mx.array([1.0, 8.0])[:, None, None]
    for key in map(mx.random.key, (0, 1)):
        size = mx.sqrt(((noisy(rows, key, 0.1) - rows) ** 2).mean(axis=-1) / (rows**2).mean(axis=-1))
        np.testing.assert_allclose(size, 0.1 * np.ones((2, 5)), rtol=0.1)
    batch, losses = packed(workshop.model, (9, 14)), []
    how = {"model": workshop.model, "teacher": workshop.teacher, "ranks": workshop.ranks, "depths": workshop.depths}
    for key, noise in ((0, 0.0), (1, 0.0), (0, 0.5), (1, 0.5)):
        given = batch._replace(keys=mx.random.key(key)[None])
        losses.append(chain_loss(workshop.trained, *given, noise=noise, **how)[0].item())
    assert losses[0] == losses[1]
    assert len({*losses}) == 3


def test_checkpointing_changes_no_gradient(workshop):
    batch = packed(workshop.model, (9, 14))
    how = {"model": workshop.model, "teacher": workshop.teacher, "ranks": workshop.ranks, "depths": workshop.depths}
    found = []
    for checkpoint in (False, True):
        gradient = nn.value_and_grad(workshop.trained, partial(chain_loss, checkpoint=checkpoint, noise=0.1, **how))
        found.append(dict(tree_flatten(tree_map(np.array, gradient(workshop.trained, *batch)[1]))))
    assert found[0].keys() == found[1].keys()
    assert all(np.abs(each).max() > 0 for each in found[0].values())
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_measure_predicts_the_cycles_of_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "BLOCK", 1)
    model, prompt = mlx_mtp.load_model(demo_path(), kernels="off"), [3, 1, 4, 1, 5, 9, 2, 6]
    steps = mlx_mtp.generate_step(mx.array(prompt), model, max_tokens=24, num_draft_tokens=3, adaptive=False)
    tokens, _, drafted = zip(*steps, strict=True)
    text = [*prompt, *map(int, tokens)]
    recording = Recording(tmp_path / "recording", {}, model.no_hidden().shape[-1])
    recording.append(text, *read(model, text), len(prompt), held=True)
    counts = measure.counts_of(model, recording, recording.documents[0], 3)
    expected, known = [False], len(prompt) + 1
    while known - 2 < len(counts):
        accepted = int(counts[known - 2, 1:].sum())
        expected += [True] * accepted + [False]
        known += accepted + 1
    assert 0 < sum(expected) < len(expected)
    assert list(drafted)[: len(expected)] == expected[: len(drafted)]


def test_rounded_weights_have_the_exact_ones_gradients():
    given = {"group_size": 32, "bits": 4}
    exact = nn.Linear(32, 8)
    layer = nn.Linear(32, 8)
    layer.update(exact.parameters())
    layer.__class__, layer._format = rounded(nn.Linear), given
    x = mx.random.normal((5, 32))
    np.testing.assert_allclose(layer(x), nn.QuantizedLinear.from_linear(exact, **given)(x), rtol=1e-4, atol=1e-5)
    assert not mx.allclose(layer(x), exact(x), atol=1e-3)
    for each in (exact, layer):
        each.found = nn.value_and_grad(each, lambda x, each=each: (each(x) * x[:, :8]).sum())(x)[1]["weight"]
    np.testing.assert_array_equal(layer.found, exact.found)
