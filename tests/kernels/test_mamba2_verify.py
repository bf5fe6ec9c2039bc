"""Compare a verify's Mamba2 recurrence with mlx-lm's kernel on single rows, whatever the rejected rows contain."""

import itertools
from types import SimpleNamespace

import mlx.core as mx
import nemotron
import numpy as np
import pytest
from gated_cases import cut, same, spoiled
from metal_cases import linux_only
from mlx_lm.models import nemotron_h as mlx_lm_port
from mlx_lm.models.ssm import compute_dt, ssm_update
from sweep import sweep

from mlx_mtp import emulator
from mlx_mtp.cache.recurrent import RecurrentCache
from mlx_mtp.kernels import mamba2_verify, mamba2_verify_ref
from mlx_mtp.layers.mamba2 import Scan
from mlx_mtp.models.nemotron_h import Mamba2Mixer

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
LIMIT = 0.001, float("inf")


class Case:
    """Rows x, B, C and dt before its softplus, views of one array, and a layer's parameters; always the same."""

    def __init__(self, rows: int, dtype: mx.Dtype, heads: int = 4, dim: int = 12, groups: int = 2, size: int = 64):
        mx.random.seed(rows)
        inner, grouped = heads * dim, groups * size
        together = mx.random.normal((1, rows, inner + 2 * grouped)).astype(dtype)
        x, B, C = mx.split(together, [inner, inner + grouped], axis=-1)
        self.x, self.dt = x.reshape(1, rows, heads, dim), mx.random.normal((1, rows, heads)).astype(dtype)
        self.B, self.C = (a.reshape(1, rows, groups, size) for a in (B, C))
        self.bias, self.A_log = mx.random.normal((heads,)), mx.log(mx.arange(1.0, heads + 1)) - 1
        self.D, self.state = mx.random.normal((heads,)).astype(dtype), mx.random.normal((1, heads, dim, size))

    @property
    def rows(self):
        return self.x, self.B, compute_dt(self.dt, self.bias, LIMIT)

    def singly(self, state: mx.array) -> tuple[list[mx.array], mx.array]:
        """Return the outputs of mlx-lm's kernel on one row after the other, and the state after them."""
        outputs = []
        for t in range(self.x.shape[1]):
            x, B, C, dt = (a[:, t : t + 1] for a in (self.x, self.B, self.C, self.dt))
            y, state = ssm_update(x, self.A_log, B, C, self.D, dt, self.bias, state, LIMIT)
            outputs.append(y)
        return outputs, state


def check(dtype: mx.Dtype, P: int, n: int, T: int, *, last: bool, contraction: str, **sizes: int):
    """Compare one verify of T rows, after a tape of P with n accepted rows, with single rows."""
    case = Case(n + T, dtype, **sizes)
    rows = cut(case.rows, n, n + T)
    tape = tuple(mx.concatenate([a[:, :n], *[a[:, :1]] * (P - n)], axis=1) for a in case.rows)
    taped = {"tape": spoiled(tape, n), "accepted": mx.array([n])} if P else {}
    with emulator.emulated(emulator.Options(fp_contract=contraction)) as launches:
        outputs, after = case.singly(case.state)
        _, before = Case.singly(SimpleNamespace(**{**vars(case), "x": case.x[:, :n]}), case.state)
        assert {launch.kernel for launch in launches} == {"ssm_kernel"}
        del launches[:]
        y, state = mamba2_verify(case.C[:, n:], rows, case.state, case.A_log, case.D, **taped, last=last)
    (launch,) = launches
    assert same(y, mx.concatenate(outputs[n:], axis=1))
    assert same(state, after if last else before)
    assert launch["state"].bytes_read == launch["state_out"].bytes_written == case.state.nbytes
    want, _ = mamba2_verify_ref(case.C[:, n:], rows, case.state, case.A_log, case.D, **taped)
    assert mx.abs(y - want).max() < {F32: 1e-5, F16: 1e-2, BF16: 1e-1}[dtype] * mx.abs(want).max()


@linux_only
@pytest.mark.parametrize(
    ("dtype", "P", "n", "T", "last", "contraction"),
    [
        (BF16, 5, 3, 4, False, "off"),
        (F32, 0, 0, 8, True, "on"),
        (F32, 3, 0, 2, False, "fast"),
        (F16, 2, 1, 3, True, "fast"),
        (BF16, 16, 9, 16, False, "on"),
    ],
)
def test_a_verify_is_mlx_lms_single_rows(dtype, P, n, T, last, contraction):
    """The state is read once and written once, for any number of rows."""
    check(dtype, P, n, T, last=last, contraction=contraction)


LARGE, SMALL = {"heads": 2, "dim": 9, "groups": 1, "size": 128}, {"groups": 4, "size": 32}
SWEPT = [
    (sizes, dtype) for sizes in ({}, LARGE, SMALL) for dtype in (F32, F16, BF16) if (sizes, dtype) != (SMALL, F32)
]


@linux_only
def test_types_that_compilers_fuse_differently_are_left_to_mlx():
    case = Case(3, F32, **SMALL)
    with emulator.emulated() as launches:
        mx.eval(mamba2_verify(case.C, case.rows, case.state, case.A_log, case.D))
    assert not launches


@sweep
@linux_only
@pytest.mark.parametrize("contraction", ["off", "on", "fast"])
@pytest.mark.parametrize(("sizes", "dtype"), SWEPT)
def test_sweep(sizes, dtype, contraction):
    for n, T, last in itertools.product((0, 1, 4, 8), range(1, 9), (False, True)):
        check(dtype, 8, n, T, last=last, contraction=contraction, **sizes)
    for n, T in itertools.product((5, 16), (9, 12, 16)):
        check(dtype, 16, n, T, last=False, contraction=contraction, **sizes)


@linux_only
def test_a_site_has_the_bits_of_single_rows():
    """As a load's trial compares them, and over verifies with any number of accepted rows."""
    mx.random.seed(3)
    layer = Mamba2Mixer(mlx_lm_port.ModelArgs.from_dict(nemotron.CONFIG))
    layer.set_dtype(BF16)
    layer.A_log = layer.A_log - 2
    site = Scan(layer, RecurrentCache)
    x = mx.random.normal((12, site.width)).astype(BF16)
    rng, position, single, rolled, launched = np.random.default_rng(0), 0, RecurrentCache(), RecurrentCache(), set()
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        (ours,), (alone,) = site.ours(x[:4]), site.alone(x[:4])
        assert same(ours, alone)
        want = mx.concatenate([site._read(layer.plain, x[i : i + 1], single) for i in range(12)])
        rolled.seek(mx.array([0]), 0)
        while position < 8:
            del launches[:]
            y = site._read(layer.fused, x[position : position + 4], rolled)
            assert [launch.kernel for launch in launches] == ["mamba2_verify"]
            assert same(y, want[position : position + 4])
            kept = int(rng.integers(0, 5))
            launched.add(kept)
            position += kept
            rolled.seek(mx.array([position]), position + 4 - kept)
    assert len(launched) > 2


def test_a_tape_and_its_count_go_together():
    case = Case(2, F32)
    with pytest.raises(ValueError, match="only tape is given; tape and accepted go together"):
        mamba2_verify(case.C, case.rows, case.state, case.A_log, case.D, tape=case.rows)
