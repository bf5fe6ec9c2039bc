"""Count the host's work for a cycle with a block drafter: calls while its graph is built, and recorded shapes."""

import sys

import block_drafters
import drafters
import families
import mlx.core as mx
import pytest
from launches.drafters import KINDS, set_block_drafter
from launches.models import MODELS, WIDTH
from launches.steps import StartState, make
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.step import step
from mlx_mtp.tuning.plan import Plan

K = 3


def calls(fn):
    """The number of calls, of Python's functions and of C's, that fn makes: a measure of the host's work."""
    counted = [0]

    def count(_frame, event, _argument):
        counted[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return counted[0]


def built(model):
    """The calls that build a cycle of K drafts after one of K drafts."""
    drafter, state = drafter_of(model), StartState(model, 4)
    width = WIDTH * (1 + len(model.taps))
    run = Run(mx.zeros((1, K + 1, width), mx.bfloat16), mx.zeros((1, K + 1), mx.int32), mx.zeros(1, mx.int32))

    def cycle():
        frame = Frame(model, cache, Plan(drafter.source, K), drafter, (Single(Picker()),), base=4)
        step(frame, run.given, cache.unload())

    cache = state.restored()
    cycle()  # fills caches of the host
    cache = state.restored()
    return calls(cycle)


@pytest.fixture(scope="module")
def target():
    return make(MODELS["Qwen3.6-27B"][0])


@pytest.fixture(scope="module")
def recycled(target):
    assert len(target.mtp) == 1
    return built(target)


@pytest.mark.parametrize(
    ("kind", "layers"), [(kind, layers) for kind in sampled(["dflash2"], KINDS) for layers in sampled([5], [2, 5])]
)
def test_building_a_cycle_is_no_more_work_than_with_recycled_heads(target, recycled, kind, layers):
    """With the released five layers; in a sweep also with two."""
    set_block_drafter(target, kind, layers)
    assert built(target) <= recycled


@pytest.mark.parametrize("kind", sampled(["dflash2"], block_drafters.KINDS))
def test_recorded_shapes_of_a_long_answer(tmp_path, kind):
    """One of equal cycles while the buffers have at most 4,096 positions, here behind a limit of 256."""
    directory, _ = families.headless(tmp_path / "target", drafters.HEADLESS["qwen3"])
    drafter = block_drafters.save(tmp_path / "drafter", block_drafters.KINDS[kind])
    model, stats, tokens = mlx_mtp.load_model(directory, draft_model=drafter), mlx_mtp.Stats(), 2000 if SWEEP else 36
    prompt = [1, 2, 3] * 80  # 240 tokens
    options = {"max_tokens": tokens, "num_draft_tokens": 7, "adaptive": False, "compile_cycles": True}
    assert len([*mlx_mtp.generate_step(prompt, model, stats=stats, **options)]) == tokens
    assert stats.compiled_cycles > 0.8 * stats.cycles
    assert stats.compiled_shapes == 1
