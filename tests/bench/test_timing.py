"""Check medians, their intervals, and the order of turns."""

import itertools
import math

import pytest

from mlx_mtp.bench import result, timing


def test_the_interval_contains_the_median_with_90_percent():
    for n in range(1, 30):
        skip = timing._skipped(n)
        outside = [2 * sum(math.comb(n, j) for j in range(s + 1)) / 2**n for s in (skip, skip + 1)]
        assert skip == 0 or outside[0] <= 0.1
        assert outside[1] > 0.1 or skip + 1 > (n - 1) // 2


def test_a_wide_spread_is_inconclusive():
    assert timing.measured([1.0, 1.02, 1.04]).conclusive
    wide = timing.measured([1.0, 1.02, 1.06])
    assert not wide.conclusive
    assert "inconclusive" in str(wide)
    assert (wide.median, wide.low, wide.high) == (1.02, 1.0, 1.06)
    assert not timing.measured([1.0]).conclusive


def test_a_ratio_is_within_a_round():
    slower_and_slower = [1.0, 2.0, 4.0]
    found = timing.ratio([2 * x for x in slower_and_slower], slower_and_slower)
    assert (found.low, found.median, found.high) == (2, 2, 2)


def test_contenders_take_turns_in_alternating_order():
    order: list[str] = []
    clock = itertools.count()

    def contender(name):
        return lambda: (order.append(name), next(clock))[1]

    found = timing.interleaved({name: contender(name) for name in "abc"}, 2, warmups=1)
    assert "".join(order) == "cba" + "abc" + "cba"
    assert found == {"a": [3, 8], "b": [4, 7], "c": [5, 6]}


def test_a_written_result_can_be_read(tmp_path):
    found = result.result("verify", {"name": "demo"}, {"rows": 4}, seconds={"1": [0.1]})
    result.write(found, tmp_path / "a.json")
    assert result.read(tmp_path / "a.json", "verify") == found
    with pytest.raises(ValueError, match="not of `bench decode`"):
        result.read(tmp_path / "a.json", "decode")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"bench": "verify"}', '{"bench": "x", "format": 1}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"a\.json: no result of"):
        result.read(tmp_path / "a.json")
