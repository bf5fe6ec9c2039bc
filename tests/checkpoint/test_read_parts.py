"""Test that a rank reads only its rows of matrices split by rows, and that they equal those of whole matrices."""

import re

import mlx.core as mx
import pytest
import rank_cases
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint import read_parts
from mlx_mtp.checkpoint.parameters import named
from mlx_mtp.ranks.split import RankShare

SPLIT_BY_ROWS = re.compile(r"(q|k|v|g|gate|up)_proj\.weight$")


class Rank(RankShare):
    """The last of several ranks, without the others."""

    def rank(self) -> int:
        return self.ranks - 1


@pytest.mark.parametrize("ranks", sampled([3], (2, 3, 4)))
@pytest.mark.parametrize("name", sampled(["step3p5", "qwen3_5"], rank_cases.FAMILIES))
def test_rows_that_are_read_are_those_of_whole_matrices(tmp_path, monkeypatch, name, ranks):
    read, real = [], read_parts._read_rows
    monkeypatch.setattr(read_parts, "_read_rows", lambda *given: read.append(real(*given)) or read[-1])
    path = rank_cases.write(tmp_path, name)
    parts, whole = (
        named(mlx_mtp.load_model(path, tensor_group=Rank(ranks), mtp=False, lazy=lazy)) for lazy in (False, True)
    )
    assert parts.keys() == whole.keys()
    for at, part in parts.items():
        assert part.dtype == whole[at].dtype
        assert mx.array_equal(part, whole[at]), at
    by_rows = {at for at, part in parts.items() if any(part is rows for rows in read)}
    assert len(by_rows) > 5
    if name == "step3p5":
        assert {at for at in parts if SPLIT_BY_ROWS.search(at)} <= by_rows
