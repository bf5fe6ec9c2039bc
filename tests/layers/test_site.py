"""Check the row counts at which a row's bits may depend on other rows, as derived from a site's attributes."""

from types import SimpleNamespace

import pytest

from mlx_mtp.layers.kernel_site import inexact_rows


@pytest.mark.parametrize(
    ("says", "on", "inexact"),
    [
        ({}, set(), {2, 3, 4, 5, 6, 7, 8}),
        ({}, {2, 3}, {4, 5, 6, 7, 8}),
        ({"stock_exact": True}, {2}, set()),
        ({"own_bits": True}, set(), {1, 2, 3}),
        ({"own_bits": True}, {2, 3}, {1}),
        ({"own_bits": True, "stock_exact": True}, set(), set()),
        ({"own_bits": True, "stock_exact": True}, {1, 2}, {3}),
        ({"bits": False}, {2}, {2}),
    ],
)
def test_inexact_rows(says, on, inexact):
    assert inexact_rows(SimpleNamespace(candidates=(1, 2, 3), rows=frozenset(on), **says)) == inexact
