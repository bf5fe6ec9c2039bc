"""Metal refuses a kernel while several sequences decode: each has the tokens that it has alone."""

import functools
import random
import warnings

import pytest
from stand_in import SITES, standing_in, switched_on
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding import build
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.tuning.kernel_fallback import GraphFailed

KINDS = ("construct", "call", "evaluate")


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(6, vocab_size=16)[0]


def alone(model, prompt, n, temp, seed, k):
    options = {"max_tokens": n, "temp": temp, "seed": seed, "num_draft_tokens": k, "prompt_lookup": False}
    return [token for token, *_ in mlx_mtp.generate_step(prompt, model, **options)]


def together(model, texts, k, **options):
    """Return the tokens of sequences given as (prompt, max_tokens, temp, seed, cycle at which it joins)."""
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=k, **options)
    found, steps, left = {}, 0, sorted(enumerate(texts), key=lambda item: item[1][-1])
    numbers = {}
    while left or batch._requests():
        while left and left[0][1][-1] <= steps:
            i, (prompt, n, temp, seed, _) = left.pop(0)
            (uid,) = batch.insert([prompt], [n], samplers=[Sampling(temp=temp)], seeds=[seed])
            numbers[uid], found[i] = i, []
        for response in batch.next()[1]:
            found[numbers[response.uid]].append(response.token)
        steps += 1
    batch.close()
    return [found[i] for i in range(len(texts))]


TEXTS = [([1, 2, 3, 4], 10, 0, 0, 0), ([9, 8, 7, 6, 5, 4], 6, 1.0, 3, 0), ([2, 2, 1], 8, 1.0, 5, 3)]


@pytest.fixture(scope="module")
def wanted(model):
    """Return the tokens of TEXTS, each decoded alone with k drafts, computed once."""
    return functools.cache(lambda k: [alone(model, *each[:-1], k) for each in TEXTS])


@pytest.mark.parametrize("k", sampled([2], [0, 1, 2, 3]))
@pytest.mark.parametrize("compiled", sampled([True], [True, False]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_never_compiles(model, wanted, k, compiled, kind):
    """The third sequence joins later, which changes the number of rows."""
    want = wanted(k)
    every = [("add_norm", None), ("verify_gemv", 4), ("verify_head_merge", None)]
    for op, rows in sampled(every[:1], every):

        def refuses(launched, template, op=op, rows=rows):
            return kind if launched == op and rows in (None, template.get("ROWS")) else None

        with standing_in(refuses), pytest.warns(UserWarning, match="fails with"):
            assert together(switched_on(model), TEXTS, k, compile_cycles=compiled, adaptive=False) == want


def test_a_compiler_that_fails_at_random(model):
    """Sequences join and leave meanwhile."""
    rng, failures = random.Random(2), 0
    for _ in range(70 if SWEEP else 2):
        k, n = rng.randrange(4), rng.randrange(1, 6)
        prompts = [[rng.randrange(16) for _ in range(rng.randrange(1, 12))] for _ in range(n)]
        texts = [
            (p, rng.randrange(4, 20), rng.choice([0, 1.0]), rng.randrange(99), rng.randrange(10)) for p in prompts
        ]
        rate, kinds = rng.choice([0.002, 0.01, 0.03]), rng.choice([KINDS, KINDS[2:]])
        want = [alone(model, *each[:-1], k) for each in texts]

        def refuses(op, template, rate=rate, kinds=kinds):
            nonlocal failures
            failed = rng.random() < rate
            failures += failed
            return rng.choice(kinds) if failed else None

        with standing_in(refuses), warnings.catch_warnings(record=True):
            assert together(switched_on(model), texts, k, adaptive=rng.random() < 0.5) == want, (texts, k)
    assert failures


@pytest.mark.parametrize("first", sampled([1], [0, 1]))
def test_every_second_graph_fails(model, wanted, monkeypatch, first):
    """Also graphs with which sequences join. As there are tokens in between, no kernel is switched off."""
    want, real, calls = wanted(2), build.start, []

    def start(*args):
        calls.append(args)
        if len(calls) % 2 == first:
            raise GraphFailed(RuntimeError("lost"))
        real(*args)

    monkeypatch.setattr(build, "start", start)
    with standing_in(), warnings.catch_warnings(record=True):
        assert together(switched_on(model), TEXTS, 2, adaptive=False) == want
    assert len(calls) > 8
    assert all(site.rows for site in model.runtime.sites if site.op in SITES)


def test_a_sequence_that_is_alone_again_continues(model):
    """The graph of the last cycle in the pool is lost: the sequence stays in the pool and leaves later."""
    long = [([1, 2, 3, 4], 60 if SWEEP else 36, 0, 0, 0), TEXTS[1]]
    want = [alone(model, *each[:-1], 2) for each in long]
    for n in sampled([160], range(100, 900, 90)):
        left = [n]

        def refuses(op, template, left=left):
            left[0] -= op == "add_norm"
            return "evaluate" if op == "add_norm" and left[0] == 0 else None

        with standing_in(refuses), warnings.catch_warnings(record=True):
            assert together(switched_on(model), long, 2, adaptive=False, compile_cycles=False) == want
