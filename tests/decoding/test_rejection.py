"""Add up all paths of the draws that keep or replace drafts: they are the target's distribution."""

import mlx.core as mx
import numpy as np
import pytest
from draws import Draws, reference
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.decoding.accept import accept
from mlx_mtp.decoding.rejection import keep_or_replace
from mlx_mtp.decoding.sampling import Picker, Sampling

KEY = mx.array([7, 11], mx.uint32)


def some_distribution(rng, n=5):
    """Of n tokens, some of them cut."""
    p = rng.dirichlet(np.full(n, 0.5)) * (rng.random(n) < 0.7)
    p[rng.integers(n)] += 0.1
    return (p / p.sum()).astype(np.float32)


@pytest.mark.parametrize("seed", sampled(range(5), range(12)))
def test_keeping_or_replacing_gives_the_targets_distribution(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    p, q = (mx.array(some_distribution(rng))[None] for _ in "pq")
    if seed == 0:
        q = mx.softmax(mx.log(p), axis=-1)  # nothing is left to replace a draft
    draws = Draws()
    draws.stand_in(monkeypatch)
    drafted = set()

    def run():
        draft = draws.gumbel_max(mx.log(q))
        token = keep_or_replace(mx.log(p), q, draft, KEY)
        drafted.add((draft.item(), token.item()))
        return token.item()

    found, kept = np.zeros(5), 0.0
    for token, probability in draws.paths(run):
        found[token] += probability
        kept += probability * (token == draws_first(draws, q))
    assert found == pytest.approx(np.array(p)[0], abs=1e-6)
    # As many as possible are kept: a replacement is never the draft itself.
    assert kept == pytest.approx(np.minimum(np.array(p), np.array(q)).sum(), abs=1e-6)


def draws_first(draws: Draws, q: mx.array) -> int:
    """The draft of the path that was just walked."""
    return [i for i, x in enumerate(np.array(q)[0]) if x > 1e-12][draws.path[0]]


@pytest.mark.parametrize("options", [{}, {"top_k": 2}], ids=["temperature", "top_k"])
def test_rows_of_two_drafts(monkeypatch, options):
    """Each row by its own q: two drafts of three tokens, from tables in place of a model."""
    rng, draws, picker = np.random.default_rng(1), Draws(), Picker(Sampling(temp=0.7, **options))
    draws.stand_in(monkeypatch)
    tables = [mx.array(rng.standard_normal((*(3,) * i, 1, 3)).astype(np.float32)) for i in (0, 1, 2, 0, 1)]
    filtered = [[mx.softmax(picker.options.scores(row, KEY)) for row in t.reshape(-1, 1, 3)] for t in tables]
    *targets, head0, head1 = filtered

    def run():
        q0 = head0[0]
        a = draws.gumbel_max(mx.log(q0)).item()
        q1 = head1[a]
        b = draws.gumbel_max(mx.log(q1)).item()
        logits = mx.concatenate([tables[0], tables[1][a], tables[2][a, b]])
        drafts = mx.array([a, b], mx.int32)
        tokens, _ = picker(logits, 0, [], drafts, mx.concatenate([q0, q1]))
        return tuple(tokens[: accept(drafts, tokens).item() + 1].tolist())

    found = {}
    for text, p in draws.paths(run):
        for n in range(1, len(text) + 1):
            found[text[:n]] = found.get(text[:n], 0.0) + p
    assert {len(text) for text in found} == {1, 2, 3}
    for (*before, token), p in found.items():
        index = int("".join(map(str, before)) or "0", 3)
        longer = sum(found.get((*before, other), 0.0) for other in range(3))
        assert p / longer == pytest.approx(targets[len(before)][index][0, token].item(), abs=1e-5)


# (vocabulary, k, tokens, options): tokens after the first come from cycles of kept, replaced and bonus draws.
LOOPS = {
    "one draft": (3, 1, 2, {"temp": 0.7}),
    "min_p": (3, 1, 2, {"temp": 1.3, "min_p": 0.3}),
    "hot": (3, 1, 2, {"temp": 2.5}),
    "two drafts": (2, 2, 3, {"temp": 1.0}),
    "the bonus": (2, 1, 3, {"temp": 1.5}),
    "xtc": (2, 1, 2, {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2}),
}
LONG = [pytest.param(case, marks=sweep) for case in ("hot", "the bonus", "xtc")]


@pytest.mark.parametrize("case", ["min_p", "two drafts", pytest.param("one draft", marks=sweep), *LONG])
def test_the_loop_has_the_targets_distribution(tiny_models, monkeypatch, case):
    V, k, n, options = LOOPS[case]
    model, plain = tiny_models(4, vocab_size=V)
    sampling, prompt = Sampling(**options), [1, 0, 1, 1, 0]
    draws = Draws(sampling.xtc_probability)
    draws.stand_in(monkeypatch)
    found, kept = {}, set()

    def run():
        # A processor keeps cycles from being built that are never used.
        steps = mlx_mtp.generate_step(
            prompt,
            model,
            max_tokens=n,
            num_draft_tokens=k,
            adaptive=False,
            draft_sampling="rejection",
            logits_processors=[lambda tokens, logits: logits],
            **options,
        )
        pairs = [(token, drafted) for token, _, drafted in steps]
        kept.update(drafted for _, drafted in pairs[1:])
        return tuple(token for token, _ in pairs)

    for text, p in draws.paths(run):
        found[text] = found.get(text, 0.0) + p
    for text, p in reference(plain, prompt, n, sampling, []).items():
        assert found.get(text, 0.0) == pytest.approx(p, abs=1e-6), text
    assert kept == {True, False}, "drafts must have been both kept and refused"
