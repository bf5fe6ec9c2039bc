"""Compare the predicted speeds of drafters in `bench model` with other figures of the cost model, and its options."""

import json

import mlx.core as mx
import pytest
from command_line import call
from launches.drafters import set_block_drafter
from launches.graph import launches
from launches.models import MODELS as TINY
from launches.models import WIDTH
from launches.steps import StartState, make
from sweep import sampled

from mlx_mtp.bench.roofline import block, chips, models, phases
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


def test_the_command_predicts_with_given_or_published_acceptance(tmp_path):
    out = tmp_path / "out.json"
    shown = call("bench", "model", "--model", "qwen3.6-27b", "--quick", "--block-rates", "1", "--out", out)
    assert shown.returncode == 0, shown.stderr
    assert "predicted, not measured: tokens/s of Qwen3.6-27B" in shown.stdout
    found = json.loads(out.read_text())["drafters"]
    assert [line["tokens"] for line in found["lines"] if line["drafter"] == "DFlash2"] == [4, 8]
    assert found["assumed"]["heads"] == list(block.Assumed.heads)
    assert "drafters" not in json.loads(call("bench", "model", "--model", "GLM-4.5", "--quick", "--json").stdout)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "GLM-4.5", "--head-rates", "0.5"), "drafters are predicted only for Qwen3.6-27B, "),
        (("--model", "GLM-4.7-Flash", "--block-rates", "1.5"), "rate 1.5 of accepted drafts; allowed are 0 to 1"),
        (("--model", "GLM-4.7-Flash", "--block-rates", "x"), "expected probabilities with commas between them"),
    ],
)
def test_mistakes_are_one_line(args, message):
    shown = call("bench", "model", *args)
    assert shown.returncode != 0
    assert message in shown.stderr
    assert shown.stderr.count("\n") == 1
