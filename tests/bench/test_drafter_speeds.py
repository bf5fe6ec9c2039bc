"""Compare the predicted speeds of drafters with other figures of the cost model, and the options of the script."""

from functools import partial

import mlx.core as mx
import pytest
from click.testing import CliRunner
from launches.drafters import set_block_drafter
from launches.graph import launches
from launches.models import MODELS as TINY
from launches.models import WIDTH
from launches.steps import StartState, make
from sweep import sampled

from bench.cost_model import drafters as block
from mlx_mtp.bench.roofline import chips, models, phases
from mlx_mtp.bench.roofline.cost import ALL, PassShape
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.tuning.plan import Plan

FITTED = chips.fitted_chips()


def test_tokens_of_a_cycle():
    assert block.tokens_per_cycle((1.0,), 15) == 16
    assert block.tokens_per_cycle((0.5, 0.25), 3) == pytest.approx(1 + 0.5 + 0.125 + 0.03125)
    assert block.tokens_per_cycle((0.9,), 0) == 1


@pytest.mark.parametrize("name", block.ASSUMED)
def test_speeds_are_tokens_over_the_predicted_cycle(name):
    model, assumed = models.MODELS[name], block.ASSUMED[name]
    lines = block.by_drafts(model, assumed, FITTED, 4096)
    assert [(line["drafter"], line["drafts"]) for line in lines[:4]] == [
        ("plain", 0),
        *(("MTP heads", k) for k in (1, 2, 3)),
    ]
    assert [line["drafts"] for line in lines[4:]] == list(range(1, 16))
    for chip in block.CHIPS:
        times = phases.shown_times(phases.predicted(model, FITTED[chip], 4096, (2, 3, 4)))
        expected = [times[phases.OURS, "plain step", 1], *(times[phases.OURS, "cycle", m] for m in (2, 3, 4))]
        assert [line["seconds"][chip] for line in lines[:4]] == pytest.approx(expected)
        seconds = [line["seconds"][chip] for line in lines if line["drafter"] == "DFlash2"]
        assert seconds == sorted(seconds)
        assert all(
            line["tokens_per_second"][chip] * line["seconds"][chip] == pytest.approx(line["tokens"]) for line in lines
        )
    longer = block.by_drafts(model, assumed, FITTED, 100_000, (7,))
    assert longer[-1]["seconds"]["M3 Max 40c"] > lines[4 + 6]["seconds"]["M3 Max 40c"]


@pytest.fixture(scope="module")
def drafting():
    """Return (a model, its block drafter)."""
    model = make(TINY["Qwen3.6-27B"][0])
    return model, set_block_drafter(model, "dflash2")


@pytest.mark.parametrize("k", sampled([7], [1, 7]))
def test_launches_of_a_block_drafter_are_those_of_its_graph(drafting, k):
    model, drafter = drafting
    state = StartState(model, 4)

    def run(*arrays):
        cache = state.restored()
        cache.load(cache.unload(), 12, 8)
        frame = Frame(model, cache, Plan("block", k), drafter, (Single(Picker()),), base=4)
        drafts = drafter.propose(frame, Run(*arrays), k)
        return [drafts.tokens, *(part for kv in cache.heads for part in kv.parts)]

    width = WIDTH * (1 + len(model.taps))
    shapes = ((1, k + 1, width), mx.bfloat16), ((1, k + 1), mx.int32), (1, mx.int32)
    counted = launches(run, lambda: [mx.zeros(*shape) for shape in shapes]).total()
    counted -= 2 * block.LAYERS  # tests run in a mode that fuses nothing: swiglu is three operations
    head, at = models.MODELS["Qwen3.6-27B"].head, PassShape(k + 1, ALL)
    assert block.of_block(WIDTH, head, k, at, FITTED["M3 Ultra"]).launches == pytest.approx(counted, abs=2)


def test_the_script_predicts_with_given_or_published_acceptance():
    run = partial(CliRunner().invoke, block.main, catch_exceptions=False)
    shown = run(["--model", "qwen3.6-27b", "--block-rates", "1"]).output
    assert "predicted, not measured: tokens/s of Qwen3.6-27B" in shown
    drafts = [line.split("│")[3].strip() for line in shown.splitlines() if line.startswith("│ DFlash2")]
    assert drafts == [f"{k + 1}.00" for k in range(1, 16)]
    assert "100% of cases with DFlash2 and in 80%, 70% with MTP heads" in " ".join(shown.split())
    for args, message in {
        ("--model", "GLM-4.5"): "'GLM-4.5' is not one of",
        ("--model", "GLM-4.7-Flash", "--block-rates", "1.5"): "rate 1.5 of accepted drafts; allowed are 0 to 1",
        ("--model", "GLM-4.7-Flash", "--block-rates", "x"): "expected probabilities with commas between them",
    }.items():
        assert message in run(args).output
