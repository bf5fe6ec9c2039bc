"""Count the rows that a drafter reads after a pause."""

from types import SimpleNamespace

import pytest

from mlx_mtp.cache.absorb import AT_FIRST, reach_of


@pytest.mark.parametrize(
    ("drafter", "windows", "rows"),
    [
        (None, [8, 8], 16),
        (None, [64, 8], AT_FIRST),
        (None, [8, None], None),
        ({"absorbs": True}, [8, 8], None),
        ({"reads_hidden": False}, [8, 8], None),
        ({}, [8, 8], 16),
    ],
)
def test_only_drafters_that_read_hidden_rows_in_windows_skip_rows(drafter, windows, rows):
    model = SimpleNamespace(drafter=None if drafter is None else SimpleNamespace(**drafter))
    assert reach_of(model, windows) == rows
