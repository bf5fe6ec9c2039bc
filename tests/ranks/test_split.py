"""Check that a target split over ranks decodes exactly, that each rank has its part, and what cannot be split."""

import re

import families
import numpy as np
import pytest
import rank_cases
import rank_group
import rank_worker
import tiny
from sweep import SWEEP, sampled, sweep

import mlx_mtp

SPLIT = (2, 3, 4)


class Group:
    """Stands for ranks that are not there."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, rank_cases.write(folder, None if SWEEP else ("step3p5",))


@pytest.mark.parametrize("n", sampled([2], SPLIT))
def test_texts_and_rows_do_not_depend_on_drafts_and_ranks_agree(checkpoints, n):
    folder, paths = checkpoints
    found = rank_group.work(n, folder, "each", paths=paths, few=not SWEEP)
    for name, path in paths.items():
        truth = rank_worker.texts(path, None, few=True)
        mine = [rank[name] for rank in found]
        assert all(rank == mine[0] for rank in mine), name
        texts = mine[0]["texts"]
        for kind, text in texts.items():
            assert text == texts["seeded" if kind.startswith("seeded") else "plain"], (name, kind)
        assert mine[0]["rows apart"] == 0, name
        assert np.allclose(mine[0]["logits"], truth["logits"], atol=1e-4), name
        assert mine[0]["split"] < truth["split"] * (1 / n + 0.15), name


@sweep
@pytest.mark.parametrize("n", [2, 4])
def test_quantized_weights_are_split(tmp_path, n):
    path = rank_cases.write_quantized(tmp_path / "model")
    found = [rank["model"] for rank in rank_group.work(n, tmp_path, "each", paths={"model": path})]
    assert all(rank == found[0] for rank in found)
    texts = found[0]["texts"]
    assert all(text == texts["seeded" if kind.startswith("seeded") else "plain"] for kind, text in texts.items())
    assert found[0]["split"] < rank_worker.texts(path, None, few=True)["split"] * (1 / n + 0.1)


@pytest.mark.parametrize(("name", "ranks", "message"), [
    ("mimo", 2, "ranks=2: mlx-lm has no way to split model_type 'mimo'; allowed is 1"),
    ("glm4_moe", 3, "ranks=3: model_type 'glm4_moe' has 4 heads in layer 0; allowed are 1, 2, 4"),
    ("glm4_moe", 16, "ranks=16: model_type 'glm4_moe' has 4 heads in layer 0; allowed are 1, 2, 4"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(tmp_path, monkeypatch, name, ranks, message):
    path, _, _ = families.build(name, tmp_path)
    monkeypatch.setattr("mlx_mtp.checkpoint.build.check_numbers", None)  # nothing may be read
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mlx_mtp.load_model(path, tensor_group=Group(ranks))


def test_a_group_of_one_is_no_group(tmp_path):
    path = tiny.save(tmp_path, tiny.CONFIG, tiny.random_weights(tiny.CONFIG))
    assert mlx_mtp.load_model(path, tensor_group=Group(1)).ranks is None


def test_adapters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="adapter_path=a: not on 2 ranks"):
        mlx_mtp.load(tmp_path, adapter_path="a", tensor_group=Group(2))
