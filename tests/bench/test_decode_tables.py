"""Check the tables of `bench decode`: rates, speeds, and comparisons of two results."""

import copy

import pytest
from results import made

from mlx_mtp.bench.decode import PLAIN
from mlx_mtp.bench.decode_tables import categories, changes, compared, overall, rows, settings, unlike

WHOLE = (0, None, None)


def test_the_arithmetic_of_a_row():
    result = made({PLAIN: [10, 20, 40], "mlx-lm": [20, 20, 20], "k=2": [20, 40, 80]})
    drafting = result["entries"][-1]
    drafting |= {"cycles": [10, 10, 10], "drafted": [[10, 5], [10, 5], [8, 6]], "accepted": [[8, 2], [8, 2], [5, 1]]}
    drafting |= {"lookup_drafted": [4, 0, 0], "lookup_accepted": [4, 0, 0]}
    result["entries"] += [{**entry, "category": "b"} for entry in copy.deepcopy(result["entries"])]
    assert settings(result) == [WHOLE]
    assert categories(result) == ["a", "b"]
    for category, n in ((None, 2), ("b", 1)):
        plain, theirs, row = rows(result, WHOLE, category)
        assert (row.contender, row.tokens, row.prompt_tokens) == ("k=2", 21 * n, 11 * n)
        assert (row.drafted, row.accepted) == pytest.approx(((44 + 4) / 3 * n, (26 + 4) / 3 * n))
        assert row.rates == pytest.approx([21 / 28, 5 / 16])
        assert row.tokens_per_cycle == pytest.approx(1 + 30 / 30)
        assert (row.speed.low, row.speed.median, row.speed.high) == pytest.approx((20, 40, 80))
        # Within each round it was twice as fast, although the machine's speed changed.
        assert (row.vs_plain.low, row.vs_plain.high, row.conclusive) == (2, 2, False)
        assert (row.vs_mlx_lm.low, row.vs_mlx_lm.high) == pytest.approx((1, 4))
        assert row.prompt_speed == pytest.approx(20)
        assert row.peak_bytes == 7
        assert not plain.conclusive
        assert theirs.tokens_per_cycle is None


def test_a_depth_that_was_never_drafted_has_no_rate():
    result = made({PLAIN: [10], "adaptive": [20]})
    result["entries"][-1] |= {"cycles": [9], "drafted": [[4, 0]], "accepted": [[3, 0]]}
    assert rows(result, WHOLE)[-1].rates == [0.75, None]
    assert list(overall(result, WHOLE).columns[4].cells)[-1] == "75%/-"


def test_texts_of_one_token_have_no_speed():
    result = made({PLAIN: [10], "k=1": [20]})
    for entry in result["entries"]:
        entry |= {"tokens": [1], "seconds": [0.0]}
    assert [(row.speed, row.vs_plain, row.conclusive) for row in rows(result, WHOLE)] == [(None, None, False)] * 2
    overall(result, WHOLE)


def test_a_change_counts_if_the_ranges_do_not_overlap():
    before, after = (made({PLAIN: [10, 10.2], "k=1": values}) for values in ([20, 21], [20.2, 22]))
    same = {(c.contender, c.what): c for c in changes(before, after)}
    assert not any(c.beyond for c in same.values())
    after = made({PLAIN: [10, 10.2], "k=1": [30, 31]})
    beyond = {(c.contender, c.what) for c in changes(before, after) if c.beyond}
    assert beyond == {("k=1", "tok/s"), ("k=1", "over plain")}
    assert next(c for c in changes(before, after) if c.beyond).ratio == pytest.approx(30.5 / 20.5, rel=0.01)
    assert compared(before, after).row_count == 3
    assert changes(made({"other": [1]}), after) == []


def test_differing_conditions_of_two_results_are_listed():
    before = made({PLAIN: [1]})
    assert unlike(before, copy.deepcopy(before)) == []
    after = made({PLAIN: [1]}, environment={"mlx": "2"}, options={"max_tokens": 3})
    after["entries"][0]["text"] = "y"
    lines = unlike(before, after)
    assert [line.partition(":")[0] for line in lines] == ["environment", "options", "texts"]
    assert "mlx was '1', is '2'" in lines[0]
