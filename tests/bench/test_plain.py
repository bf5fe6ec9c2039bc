"""The ratios of `bench/plain.py`: medians with intervals that depend on the values alone."""

import math
import random

import plain


def test_a_ratio_has_the_interval_of_its_median():
    rng = random.Random(1)
    for count, width in ((24, 0.1), (6, 0.1), (24, 0.0)):
        values = [1.5 + rng.uniform(-width, width) for _ in range(count)]
        found = plain.ratio_of(values)
        assert found == plain.ratio_of(values)
        low, high = found.interval
        assert min(values) <= low <= found.median <= high <= max(values)
        assert math.isclose(low, high) == (width == 0)
        assert found.quartiles[0] <= found.median <= found.quartiles[1]


def test_the_interval_covers_the_true_median_in_most_samples():
    rng = random.Random(2)
    intervals = [plain.ratio_of([rng.gauss(1, 0.1) for _ in range(12)]).interval for _ in range(16)]
    assert sum(low <= 1 <= high for low, high in intervals) >= 13


def test_ratios_compare_turns_of_one_round_with_the_first_loop():
    found = plain.ratios({"mlx-lm": [1.0, 2.0, 4.0], "plain": [0.5, 1.0, 2.0]})
    assert found.keys() == {"plain"}
    assert found["plain"].median == 2
    assert str(found["plain"]) == "2.000x [2.000, 2.000] (2.00 to 2.00)"
