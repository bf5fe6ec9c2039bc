"""Check every site at 9 to 16 rows of one sequence, as a load's trial does, against MLX's kernels in the emulator."""

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest
from metal_cases import linux_only
from stock_ops import stock_ops
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.bench.kernels_cases import SMALL
from mlx_mtp.cache.ring import MAX_ROWS
from mlx_mtp.emulator import stock
from mlx_mtp.layers.kernel_site import TOGETHER_ROWS
from mlx_mtp.tuning import ab_test
from mlx_mtp.tuning.kernel_switch import more_trials

CHEAP = [("verify_qmm", 13), ("verify_qmm_heads", 9), ("verify_glu", 16), ("add_norm", 16), ("norm_rope", 11)]
SLOW = "verify_latent_attention"  # to emulate


def test_every_site_serves_them():
    for op, make in SMALL.items():
        site = make()
        assert set(TOGETHER_ROWS) <= {*site.every_count}, op
        assert max(site.every_count) == MAX_ROWS
        assert {trial.rows for trial in more_trials([site], mx.bfloat16)} == set(TOGETHER_ROWS)


@linux_only
@pytest.mark.parametrize(("op", "rows"), sampled(CHEAP[::2], itertools.product(SMALL, TOGETHER_ROWS)))
def test_rows_have_the_bits_of_one_row(op, rows, quick_trials):
    """Also with NaN and infinity in other rows; those of an op with its own order of sums err as little as MLX's."""
    with stock_ops(), emulator.emulated(emulator.Options(traffic=False)):
        site = SMALL[op]()
        if op == SLOW:
            site.OFFSET, site.SLOTS = 50, 50 + MAX_ROWS
        trial = next(t for t in more_trials([site], mx.bfloat16) if t.rows == rows and not t.base)
        if op == "verify_gemv":
            trial = replace(trial, pairs=[(site.ours, lambda x: [stock.gemv(x, site.module.weight)[0]])])
        assert ab_test.check(replace(trial, draws=2)) is None
        if trial.split:
            assert ab_test.check(replace(trial.of_split(), draws=1)) is None
