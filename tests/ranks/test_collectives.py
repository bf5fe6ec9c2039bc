"""Compare the collectives of a cycle with those of the cost model."""

from pathlib import Path

import mlx.core as mx
import pytest
import rank_cases
from rank_worker import PROMPT

import mlx_mtp
from mlx_mtp.bench.roofline.links import AGREEMENT, LINKS, collectives, over_links, sent
from mlx_mtp.bench.roofline.models import MODELS, of_port
from mlx_mtp.checkpoint.inspect import as_text, inspect_checkpoint
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.ranks.split import RankShare


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Path(rank_cases.write(tmp_path_factory.mktemp("model"), "step3p5"))


@pytest.fixture
def gathered(monkeypatch):
    """Record the shapes of gathered arrays, with two ranks that send the same."""
    shapes = []

    def all_gather(x, group):
        shapes.append(x.shape)
        return mx.concatenate([x] * group.size())

    monkeypatch.setattr(mx.distributed, "all_gather", all_gather)
    return shapes


def test_a_cycle_has_two_sums_a_layer_and_one_message_with_drafts_and_without(path, gathered):
    model, ops = mlx_mtp.load_model(path, tensor_group=RankShare(2)), of_port(mlx_mtp.load_model(path, lazy=True), 2)
    for k in (0, 3):
        counts = []
        for n in (2, 6):
            gathered.clear()
            stats = Stats()
            options = {"num_draft_tokens": k, "adaptive": False, "prompt_lookup": False, "stats": stats}
            list(mlx_mtp.generate_step(PROMPT, model, max_tokens=n, **options))
            counts.append((len(gathered), stats.cycles))
        (few, first), (many, last) = counts
        built = (many - few) / (last - first)  # the cycle that is built ahead but not submitted gathers nothing
        assert built == collectives(ops) == 2 * len(model.layers) + 1
        rows = [shape for shape in gathered if len(shape) == 4]
        assert rows[-1] == (1, 1, k + 1, ops.head.k)


def test_bytes_and_times_by_hand():
    model = MODELS["Step-3.5-Flash"]
    assert collectives(model) == 2 * 45 + 1
    assert sent(model, 4, 3) == 2 * (90 * 4 * 4096 * 2 + AGREEMENT)
    lines = {(line["rows"], line["link"]): line["seconds"] for line in over_links(model, 2, [1, 4])}
    assert lines[1, LINKS[1].name] == pytest.approx(91 * 300e-6 + (90 * 8192 + 24) / 1.25e9)
    assert lines[4, LINKS[0].name] == pytest.approx(91 * 9e-6 + (90 * 4 * 8192 + 24) / 6.9e9)


def test_inspect_lists_the_memory_of_each_machine(path):
    whole, half = inspect_checkpoint(path), inspect_checkpoint(path, ranks=2)
    assert half.part < 0.6 * whole.target.loaded
    assert half.memory.kv * 2 == whole.memory.kv
    assert half.memory.least < whole.memory.least
    assert "ranks      2, with " in as_text(half)
    refused = inspect_checkpoint(path, ranks=5)
    assert refused.problems == (
        "ranks=5: model_type 'step3p5' has 12 heads in layer 0; allowed ranks are 1, 2, 3, 4, 6, 12",
    )
