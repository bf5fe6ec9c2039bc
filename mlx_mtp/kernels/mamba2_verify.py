"""Run Mamba2's recurrence: the accepted rows of the last verify's tape again, then new rows, in one launch.

The bits are those of mlx-lm's kernel on one row at a time.
"""

import mlx.core as mx

from ._source import Maybe, check_tape, constants, floats, launch, on_metal

Rows = tuple[mx.array, mx.array, mx.array]  # in the order of NAMES
NAMES = ("x", "B", "dt")
LANES, SIMDGROUPS = 32, 8  # per row of the state; per threadgroup


def mamba2_verify_ref(
    C: mx.array,
    rows: Rows,
    state: mx.array,
    A_log: mx.array,
    D: mx.array,
    *,
    tape: Rows | None = None,
    accepted: Maybe = None,
    last: bool = False,
) -> tuple[mx.array, mx.array]:
    """Return (y, state) of Mamba2's recurrence over a tape's accepted rows, then new rows, one by one in float32.

    The reference of `mamba2_verify`, with its arguments.
    """
    if tape is not None and accepted is not None:
        for t in range(tape[0].shape[1]):
            state = mx.where(t < accepted, _after(state, A_log, *(a[:, t] for a in tape)), state)
    before, outputs, x = state, [], rows[0]
    for t in range(x.shape[1]):
        state = _after(state, A_log, *(a[:, t] for a in rows))
        heads = mx.repeat(C[:, t].astype(mx.float32), state.shape[1] // C.shape[2], axis=1)
        outputs.append((state * heads[:, :, None]).sum(-1) + x[:, t].astype(mx.float32) * D[:, None])
    return mx.stack(outputs, axis=1).astype(x.dtype), state if last else before


def _after(state: mx.array, A_log: mx.array, x: mx.array, B: mx.array, dt: mx.array) -> mx.array:
    """Return the state after one row: x [1, H, Dh], B [1, G, Ds], dt [1, H]."""
    B = mx.repeat(B.astype(mx.float32), state.shape[1] // B.shape[1], axis=1)[:, :, None]
    decay = mx.exp(-mx.exp(A_log.astype(mx.float32)) * dt)
    return decay[..., None, None] * state + (x.astype(mx.float32) * dt[..., None])[..., None] * B


def _supported(C: mx.array, rows: Rows, state: mx.array, A_log: mx.array, D: mx.array, tape: Rows | None) -> bool:
    x, B, dt = rows
    same = all(a.dtype == b.dtype and a.shape[2:] == b.shape[2:] for a, b in zip(rows, tape or rows, strict=True))
    typed = floats(x, A_log) and x.dtype == B.dtype == C.dtype == D.dtype and dt.dtype == state.dtype == mx.float32
    known = x.dtype != mx.float32 or state.shape[3] > LANES  # else compilers fuse mlx-lm's kernel differently
    whole = x.shape[0] == 1 and state.shape[3] % LANES == 0 and x.shape[2] % B.shape[2] == 0
    return same and typed and known and whole


def mamba2_verify(
    C: mx.array,
    rows: Rows,
    state: mx.array,
    A_log: mx.array,
    D: mx.array,
    *,
    tape: Rows | None = None,
    accepted: Maybe = None,
    last: bool = False,
) -> tuple[mx.array, mx.array]:
    """Process the first `accepted` rows of a tape, then new rows; return y and a state.

    For each row: state = exp(-exp(A_log) dt) state + x dt B; y = state C + D x.

    C: [1, T, G, Ds]. rows: x [1, T, H, Dh] and B [1, T, G, Ds], of float16, bfloat16 or float32 like C and D [H];
        dt [1, T, H] float32, after its softplus. A_log: [H]. Any array may be a view.
    state: [1, H, Dh, Ds] float32, before the tape. y: [1, T, H, Dh] in x's dtype.
    tape: P rows in the form of `rows`; those after the accepted may hold anything. None: no tape.
    accepted: [1] int32, from 0 to P; ValueError unless it is given exactly if a tape is.
    The returned state is the one before the new rows, with `last` the one after them.
    """
    check_tape(tape, accepted)
    if not (on_metal() and _supported(C, rows, state, A_log, D, tape)):
        return mamba2_verify_ref(C, rows, state, A_log, D, tape=tape, accepted=accepted, last=last)
    x, (_, H, Dh, Ds) = rows[0], state.shape
    if tape is None or accepted is None:
        tape, accepted = rows, constants(mx.int32, 0)  # none of these rows is accepted
    inputs = {"state": state, **{f"tape_{name}": a for name, a in zip(NAMES, tape, strict=True)}}
    inputs |= {"accepted": accepted, "last": constants(mx.int32, int(last)), **dict(zip(NAMES, rows, strict=True))}
    y, state = launch(
        "mamba2_verify",
        {**inputs, "C": C, "A_log": A_log, "D": D},
        {"y": (x.shape, x.dtype), "state_out": (state.shape, mx.float32)},
        template={"InT": x.dtype, "Ds": Ds},
        grid=(LANES, Dh, H),
        group=(LANES, SIMDGROUPS, 1),
    )
    return y, state
