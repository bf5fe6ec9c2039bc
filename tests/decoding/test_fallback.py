"""Metal refuses a kernel during a generation: no token is lost or changed, and the cache stays correct."""

import itertools
import random
import warnings

import mlx.core as mx
import pytest
from stand_in import standing_in, switched_on
from subjects import assert_same_rows
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.tuning.kernel_fallback import failed_kernels

PROMPT = [1, 2, 3, 0, 2, 2, 1, 7, 9]
OPTIONS = {
    "plain": {"num_draft_tokens": 0},
    "drafts": {"num_draft_tokens": 3},
    "seeded": {"num_draft_tokens": 2, "temp": 1.0, "seed": 7},
    "confidence": {"num_draft_tokens": 3, "draft_p_min": 0.3},
    "built": {"num_draft_tokens": 3, "compile_cycles": False},
    "logprobs": {"num_draft_tokens": 3, "logprobs": True, "temp": 1.0, "seed": 3},
    "chunks": {"num_draft_tokens": 3, "prefill_step_size": 2},
    "quantized later": {"num_draft_tokens": 3, "kv_bits": 8, "quantized_kv_start": 14, "kv_group_size": 32},
}
KINDS = ("construct", "call", "evaluate")
OPS = ("add_norm", "verify_gemv", "verify_head_dense", "verify_head_merge")


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(5, vocab_size=16, head_dim=32)[0]


def steps(model, prompt=PROMPT, **options):
    return mlx_mtp.generate_step(prompt, model, **{"max_tokens": 16, "adaptive": False, **options})


def text(model, **options):
    return [token for token, *_ in steps(model, **options)]


class Once:
    """Refuses the n-th launch of an op, and with `stays` every later launch of the same source."""

    def __init__(self, op, n, how, *, stays):
        self.op, self.left, self.how, self.stays, self.key = op, n, how, stays, None

    def __call__(self, op, template):
        if op != self.op:
            return None
        if self.key is not None:
            return self.how if self.stays and self.key == template else None
        self.left -= 1
        if self.left:
            return None
        self.key = template
        return self.how


@pytest.mark.parametrize(("name", "kind"), sampled(paired(OPTIONS, KINDS)[::2], paired(OPTIONS, KINDS)))
def test_a_kernel_that_never_compiles(model, name, kind):
    options = OPTIONS[name]
    want = text(model, **options)
    for op in sampled([OPS[len(name + kind) % len(OPS)]], OPS):
        refused = standing_in(lambda launched, _, op=op: kind if launched == op else None)
        with refused, pytest.warns(UserWarning, match="fails with"):
            assert text(switched_on(model), **options) == want, op
        assert failed_kernels(model)


@pytest.mark.parametrize(
    ("name", "n"), sampled([("drafts", 60), ("confidence", 3)], itertools.product(OPTIONS, (1, 2, 5, 9, 30, 60, 100)))
)
def test_one_launch_in_the_middle(model, name, n):
    """The graph and the buffers that it wrote in place are lost; each kernel alone still runs."""
    want = text(model, **OPTIONS[name])
    for op in sampled(["add_norm"], OPS):
        with standing_in(Once(op, n, "evaluate", stays=False)), warnings.catch_warnings(record=True):
            assert text(switched_on(model), **OPTIONS[name]) == want


def test_what_raises_in_mlxs_own_calls(model, monkeypatch):
    """The graph is intact: mx.async_eval raises before or after the work, or the wait for tokens raises."""
    options = {**OPTIONS["drafts"], "max_tokens": 10}
    want = text(model, **options)
    for name, after in (("async_eval", False), ("async_eval", True), ("eval", False)):
        real, calls = getattr(mx, name), []

        def broken(*args, real=real, calls=calls, after=after):
            calls.append(args)
            if len(calls) % 7 == 3 and not after:
                raise RuntimeError("[metal::Device] Unable to load kernel")
            real(*args)
            if len(calls) % 7 == 3:
                raise RuntimeError("[metal::Device] Unable to load kernel")

        with standing_in(), warnings.catch_warnings(record=True), monkeypatch.context() as patch:
            switched_on(model)
            patch.setattr(mx, name, broken)
            assert text(model, **options) == want
        assert len(calls) >= 3


@pytest.mark.parametrize("shown", sampled([7], range(1, 12)))
def test_a_cache_is_correct_after_an_early_stop(model, shown):
    """Stopped directly after a graph was lost, before the generation resumes."""
    for n in sampled([60], range(10, 90, 7)):
        caches = [mlx_mtp.make_prompt_cache(model) for _ in range(2)]
        with standing_in(Once("add_norm", n, "evaluate", stays=False)), warnings.catch_warnings(record=True):
            switched_on(model)
            answer = steps(model, prompt_cache=caches[0], num_draft_tokens=3)
            tokens = [next(answer)[0] for _ in range(shown)]
            answer.close()
        plain = [token for token, *_ in steps(model, prompt_cache=caches[1], num_draft_tokens=0, max_tokens=shown)]
        assert tokens == plain
        assert caches[0].tokens == caches[1].tokens == [*PROMPT, *tokens[:-1]]
        assert_same_rows(model, *caches)
        more = [text(model, prompt=tokens[-1:], prompt_cache=cache, num_draft_tokens=3) for cache in caches]
        assert more[0] == more[1]


def test_a_compiler_that_fails_at_random(model):
    """Sources and single launches fail at several rates in many generations: no token is lost or changed."""
    rng, failures = random.Random(1), 0
    names = [*OPTIONS]
    for _ in range(200 if SWEEP else 2):
        prompt, options = [rng.randrange(16) for _ in range(rng.randrange(1, 12))], OPTIONS[rng.choice(names)]
        rate, kinds = rng.choice([0.002, 0.01, 0.05]), rng.choice([KINDS, KINDS[2:]])
        want = text(model, prompt=prompt, **options)

        def refuses(op, template, rate=rate, kinds=kinds):
            nonlocal failures
            failed = rng.random() < rate
            failures += failed
            return rng.choice(kinds) if failed else None

        with standing_in(refuses), warnings.catch_warnings(record=True):
            assert text(switched_on(model), prompt=prompt, **options) == want, (prompt, options)
    assert failures
