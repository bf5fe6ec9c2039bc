"""A kernel that one rank refuses is off on all of them, and tokens do not change."""

import pytest
import rank_cases
import rank_group
from sweep import SWEEP, sampled

CASES = [
    ([1], "verify_gemv", "evaluate", 4),
    ([0], "add_norm", "call", None),
    ([1], "verify_gemv", "construct", None),
    ([0, 1], "add_norm", "construct", None),
    ([0, 1], "verify_gemv", "evaluate", None),
]


@pytest.mark.parametrize(("ranks", "op", "how", "rows"), sampled([], CASES))
def test_a_refused_kernel_is_off_on_all_ranks(tmp_path, ranks, op, how, rows):
    path = rank_cases.write(tmp_path, "step3p5")
    what = {"path": path, "ranks": ranks, "op": op, "how": how, "rows": rows, "few": not SWEEP}
    first, *others = rank_group.work(2, tmp_path, "refused", **what)
    assert all(first["same"].values())
    assert first["warned"]
    for other in others:
        assert (other["same"], other["kernels"]) == (first["same"], first["kernels"])
    failed = [line.split()[0] for line in first["kernels"] if "fails with" in line]
    assert set(failed) == {op}
