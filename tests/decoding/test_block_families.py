"""Every family with a block drafter of every kind: the text is the target's for each number of drafts."""

import itertools

import block_drafters
import drafters
import families
import numpy as np
import pytest
from sweep import SWEEP, sampled

import mlx_mtp

KINDS = list(block_drafters.KINDS)
FAMILIES = [*drafters.HEADLESS, *sorted(families.FAMILIES)]
N = 14 if SWEEP else 9
PROMPTS = [np.random.default_rng(n).integers(0, 5, n).tolist() for n in (19, 3)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(directory, hidden_size, vocab_size) of a family's tiny checkpoint"""
    found: dict = {}

    def make(name):
        if name not in found:
            path = tmp_path_factory.mktemp("target")
            known = drafters.HEADLESS.get(name)
            directory = families.headless(path, known)[0] if known else families.build(name, path)[0]
            model = mlx_mtp.load_model(directory, mtp=False)
            found[name] = directory, model.no_hidden().shape[-1], model.vocab_size
        return found[name]

    return make


def texts(model, k, **options):
    def text(prompt):
        steps = mlx_mtp.generate_step(
            prompt, model, max_tokens=N, num_draft_tokens=k, adaptive=False, prefill_step_size=7, **options
        )
        return [token for token, _, _ in steps]

    return [text(prompt) for prompt in PROMPTS]


def batched(model, k, **options):
    found, batch = [[] for _ in PROMPTS], mlx_mtp.BatchGenerator(model, num_draft_tokens=k, adaptive=False, **options)
    batch.insert(PROMPTS, [N] * len(PROMPTS))
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    return found


@pytest.mark.parametrize(
    ("name", "kind"), sampled([*zip(FAMILIES[::14], KINDS, strict=False)], itertools.product(FAMILIES, KINDS))
)
def test_greedy_text_is_that_of_plain_decoding(target, tmp_path, name, kind):
    directory, width, vocab = target(name)
    model = mlx_mtp.load_model(directory, draft_model=block_drafters.save_for(tmp_path / kind, kind, width, vocab))
    assert model.max_draft_tokens == 15
    plain = texts(model, 0)
    for k in sampled((2, 15), range(1, 16)):
        assert texts(model, k, compile_cycles=k % 2 > 0) == plain, k
    for replay in sampled((True,), (False, True)):
        assert batched(model, 5, compile_cycles=replay) == plain


@pytest.mark.parametrize("name", sampled(["qwen3_5"], ["qwen3_5", "deepseek_v3"]))
def test_a_target_without_its_own_heads(target, tmp_path, name):
    """With mtp=False a drafter drafts alone: the checkpoint's heads are not loaded."""
    directory, width, vocab = target(name)
    drafter = block_drafters.save_for(tmp_path, "dflash2", width, vocab)
    model = mlx_mtp.load_model(directory, draft_model=drafter, mtp=False)
    assert not model.mtp
    plain = texts(model, 0)
    model.drafter = None
    assert texts(model, 0) == plain
