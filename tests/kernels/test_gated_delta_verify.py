"""Compare a verify's recurrence with mlx-lm's kernels on one row at a time, whatever the rejected rows contain."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from gated_cases import cut, exactly, make_rows, same, spoiled
from metal_cases import exact, linux_only
from mlx_lm.models import gated_delta as stock
from sweep import SWEEP, sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels.gated_delta_verify import gated_delta_verify, gated_delta_verify_ref

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
CONTRACTIONS = ("off", "on", "fast")

PACKED = {"dk": 128, "dv": 16}
LAYOUTS = {
    "packed": PACKED,
    "packed in an odd number of groups": {"dk": 128, "dv": 24, "hk": 1, "hv": 3, "B": 2},
    "scalar": {"dk": 64, "B": 2},
    "scalar of 128": {"dk": 128, "dv": 12},
    "scalar of 16 bits": {"dk": 128, "gate": "rounded"},
    "vector": {"dk": 64, "gate": "vector", "hv": 6, "B": 2},
    "vector of 128": {"dk": 128, "gate": "vector"},
    "equal heads": {"dk": 32, "dv": 4, "hk": 3, "hv": 3},
    "wide": {"dk": 256, "dv": 4},
}
# layout, rows' dtype, P, n, T, last
SAMPLE = [
    ("packed", BF16, 5, 3, 4, False),
    ("packed", F32, 4, 4, 8, True),
    ("packed in an odd number of groups", F16, 3, 0, 2, False),
    ("scalar", BF16, 8, 7, 1, False),
    ("packed", BF16, 16, 11, 16, False),
    ("scalar of 128", F16, 3, 3, 5, False),
    ("scalar of 16 bits", BF16, 2, 1, 2, False),
    ("vector", F32, 4, 2, 6, False),
    ("vector of 128", BF16, 3, 1, 7, True),
    ("equal heads", F16, 0, 0, 1, False),
]


def one_by_one(q, rows, state):
    """Run mlx-lm's kernel on one row after the other."""
    outputs = []
    for t in range(q.shape[1]):
        y, state = stock.gated_delta_kernel(q[:, t : t + 1], *cut(rows, t, t + 1), state)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1) if outputs else None, state


def start(layout, P, T, dtype, **more):
    """Return a state, and q and rows of a tape and of a verify."""
    tape, new = (make_rows(n, dtype=dtype, **{**LAYOUTS[layout], **more}) for n in (P, T))
    (k, v, *_) = new[1]
    return mx.random.normal((k.shape[0], v.shape[2], v.shape[3], k.shape[3])), tape, new


def check(case, launches):
    """Compare one verify with single rows; return the launch geometries."""
    layout, dtype, P, n, T, last = case
    state, (tape_q, tape), (q, rows) = start(layout, P, T, dtype)
    taped = {"tape": spoiled(tape, n), "accepted": mx.array([n])} if P else {}
    y, got = gated_delta_verify(q, rows, state, **taped, last=last)
    assert [launch.kernel for launch in launches] == ["gated_delta_verify"]
    _, before = one_by_one(tape_q[:, :n], cut(tape, 0, n), state)
    want, after = one_by_one(q, rows, before)
    assert same(y, want)
    assert same(got, after if last else before)
    return {(launch.grid, launch.threadgroup) for launch in launches}


@linux_only
@pytest.mark.parametrize(
    ("case", "contraction"),
    [
        (case, rule)
        for i, case in enumerate(SAMPLE)
        for rule in sampled([CONTRACTIONS[i % 3]], (CONTRACTIONS[i % 2], "fast"))
    ],
    ids=lambda c: c if isinstance(c, str) else f"{c[0]}-{c[1]}-{c[2]}-{c[3]}-{c[4]}",
)
def test_a_verify_is_mlx_lms_single_rows(case, contraction):
    with emulator.emulated(emulator.Options(fp_contract=contraction, traffic=False)) as launches:
        assert len(check(case, launches)) == 1  # so the lanes of a sum are the same on a GPU


@linux_only
@pytest.mark.parametrize("order", sampled([5], ["reverse", 5]))
@pytest.mark.parametrize("case", [SAMPLE[0], SAMPLE[3], SAMPLE[7]], ids=lambda c: c[0])
def test_in_any_order_of_threads(case, order):
    with emulator.emulated(emulator.Options(order=order)) as launches:
        check(case, launches)


@sweep
@linux_only
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sweep(layout, dtype, contraction):
    sizes = [(P, n, T) for P in (0, 1, 3, 8) for n in {0, P // 2, P} for T in range(1, 9)]
    sizes += [(16, n, T) for n in (3, 16) for T in (9, 12, 13, 16)]
    for (P, n, T), last in itertools.product(sizes, (False, True)):
        with emulator.emulated(emulator.Options(fp_contract=contraction, traffic=False)) as launches:
            assert len(check((layout, dtype, P, n, T, last), launches)) == 1, (P, n, T, last)


@linux_only
@pytest.mark.parametrize(("layout", "last"), [("packed", False), ("scalar", True), ("vector", False)])
def test_memory_is_asked_for_once(layout, last):
    """The state is read once and written once; only accepted rows of the tape are read."""
    state, (_, tape), (q, rows) = start(layout, 6, 4, BF16)
    with emulator.emulated() as launches:
        gated_delta_verify(q, rows, state, tape=tape, accepted=mx.array([2]), last=last)
    (launch,) = launches
    assert launch["state"].bytes_read == launch["state_out"].bytes_written == state.nbytes
    assert launch["state"].reread == 1.0
    for name, array in zip(("tape_k", "tape_v", "tape_g", "tape_beta"), tape, strict=True):
        assert launch[name].distinct_read == array.nbytes // 6 * 2, name
    assert launch["y"].bytes_written == launch["v"].distinct_read
    assert launch.max_barriers == 0
    assert launch.max_collectives == (2 + 2 * 4) * (2 if layout == "packed" else 1)


@linux_only
@pytest.mark.parametrize("wrong", [-3, 7])
def test_a_count_beyond_the_tape_stays_on_it(wrong):
    state, (_, tape), (q, rows) = start("scalar", 4, 1, F32)
    with emulator.emulated():
        counts = (wrong, 4 if wrong > 0 else 0)
        got, want = (gated_delta_verify(q, rows, state, tape=tape, accepted=mx.array([n])) for n in counts)
    assert all(map(same, got, want))


@linux_only
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("packed", BF16),
        pytest.param("packed", F16, marks=sweep),
        pytest.param("scalar", F16, marks=sweep),
        pytest.param("vector", BF16, marks=sweep),
    ],
)
def test_many_rows_do_not_drift(layout, dtype, record_property):
    """Verifies of any length, with any number of accepted rows, have the bits, and so the error, of single rows."""
    shape = {**LAYOUTS[layout], "hk": 1, "hv": 1, "dv": 8, "B": 1}
    q, rows = make_rows(count := 512 if SWEEP else 128, dtype=dtype, slow=True, **shape)
    state = rolled = mx.zeros((1, 1, 8, shape["dk"]))
    rng, position, tape, accepted = np.random.default_rng(0), 0, None, None
    outputs = []
    with emulator.emulated(emulator.Options(fp_contract="fast", traffic=False)):
        while position < count:
            T = min(int(rng.integers(1, 9)), count - position)
            new = cut(rows, position, position + T)
            y, rolled = gated_delta_verify(q[:, position : position + T], new, rolled, tape=tape, accepted=accepted)
            kept = int(rng.integers(0, T + 1))
            tape, accepted = spoiled(new, kept), mx.array([kept])
            outputs.append(y[:, :kept])
            position += kept
        q1, rows1 = q[:, :1], cut(rows, 0, 1)
        _, end = gated_delta_verify(q1, rows1, rolled, tape=tape, accepted=accepted)
        want, single = one_by_one(q, rows, state)
    y = mx.concatenate(outputs, axis=1)
    assert same(y, want)
    assert same(end, single)
    exact_y, exact_end = exactly(q, rows, np.array(state))
    drift = np.abs(exact(end) - exact_end).max() / np.abs(exact_end).max()
    record_property("drift of the state", float(drift))
    assert drift < 2e-6
    assert np.abs(exact(y) - exact_y).max() / np.abs(exact_y).max() < (2**-11 if dtype == F16 else 2**-8)


@pytest.mark.parametrize("layout", ["packed", "scalar", "vector"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_reference_is_the_rule(layout, dtype):
    state, (tape_q, tape), (q, rows) = start(layout, 5, 3, dtype)
    more = {"tape": spoiled(tape, 2), "accepted": mx.array([2])}
    _, before = exactly(tape_q[:, :2], cut(tape, 0, 2), np.array(state))
    want, after = exactly(q, rows, before)
    for last, end in ((False, before), (True, after)):
        y, got = gated_delta_verify_ref(q, rows, state, **more, last=last)
        assert y.dtype == dtype
        assert np.abs(exact(y) - want).max() < (1e-6 if dtype == F32 else 2**-8) * np.abs(want).max()
        assert np.abs(np.array(got) - end).max() < 1e-6 * np.abs(end).max()
    alone, _ = gated_delta_verify_ref(q, rows, mx.array(before.astype(np.float32)))
    assert np.abs(exact(alone) - exact(y)).max() < 2**-7 * np.abs(want).max()


@linux_only
@pytest.mark.parametrize(
    ("shape", "state_type"),
    [({"dk": 48}, F32), ({"dv": 6}, F32), ({}, F16), ({"mixed": True}, F32)],
    ids=["Dk of 48", "Dv of 6", "state of 16 bits", "a tape of another type"],
)
def test_the_reference_computes_what_the_kernel_does_not_support(shape, state_type):
    mixed = shape.pop("mixed", False)
    q, rows = make_rows(2, **shape)
    _, tape = make_rows(3, dtype=F16 if mixed else F32, **shape)
    state = mx.random.normal((1, 4, rows[1].shape[3], rows[0].shape[3])).astype(state_type)
    more = {"tape": tape, "accepted": mx.array([1])}
    with emulator.emulated() as launches:
        got = gated_delta_verify(q, rows, state, **more)
    assert not launches
    assert all(mx.array_equal(a, b) for a, b in zip(got, gated_delta_verify_ref(q, rows, state, **more), strict=True))


def test_a_tape_needs_its_count():
    q, rows = make_rows(1)
    state = mx.zeros((1, 4, 8, 64))
    for given, more in (("tape", {"tape": rows}), ("accepted", {"accepted": mx.array([0])})):
        with pytest.raises(ValueError, match=f"only {given} is given"):
            gated_delta_verify(q, rows, state, **more)
