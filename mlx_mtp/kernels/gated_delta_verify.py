"""Run the gated delta rule: the accepted rows of the last verify's tape again, then new rows, in one launch.

The bits are those of mlx-lm's kernel on one row at a time: for Dk = 128 and scalar float32 gates the one that packs
eight rows of a state into a simdgroup, else the one with a row per simdgroup.
"""

import mlx.core as mx

from ._source import Maybe, check_tape, constants, floats, launch, on_metal

Rows = tuple[mx.array, mx.array, mx.array, mx.array]  # in the order of NAMES
NAMES = ("k", "v", "g", "beta")


def gated_delta_verify_ref(
    q: mx.array, rows: Rows, state: mx.array, *, tape: Rows | None = None, accepted: Maybe = None, last: bool = False
) -> tuple[mx.array, mx.array]:
    """Return (y, state) of the gated delta rule over a tape's accepted rows, then new rows, one by one in float32.

    The reference of `gated_delta_verify`, with its arguments.
    """
    if tape is not None and accepted is not None:
        for t in range(tape[0].shape[1]):
            state = mx.where((t < accepted).reshape(-1, 1, 1, 1), _after(state, *(x[:, t] for x in tape)), state)
    before, outputs = state, []
    for t in range(q.shape[1]):
        state = _after(state, *(x[:, t] for x in rows))
        heads = mx.repeat(q[:, t].astype(mx.float32), state.shape[1] // q.shape[2], axis=1)
        outputs.append((state * heads[:, :, None]).sum(-1))
    return mx.stack(outputs, axis=1).astype(q.dtype), state if last else before


def _after(state: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array) -> mx.array:
    """Return the state after one row: k [B, Hk, Dk], v [B, Hv, Dv], g [B, Hv] or [B, Hv, Dk], beta [B, Hv]."""
    k = mx.repeat(k.astype(mx.float32), state.shape[1] // k.shape[1], axis=1)[:, :, None]
    state = state * (g[..., None, None] if g.ndim == 2 else g[:, :, None]).astype(mx.float32)
    delta = (v.astype(mx.float32) - (state * k).sum(-1)) * beta.astype(mx.float32)[..., None]
    return state + k * delta[..., None]


def _supported(q: mx.array, rows: Rows, state: mx.array, tape: Rows | None) -> bool:
    _, Hv, Dv, Dk = state.shape
    same = all(a.dtype == b.dtype and a.shape[2:] == b.shape[2:] for a, b in zip(rows, tape or rows, strict=True))
    typed = floats(*rows) and q.dtype == rows[0].dtype
    return same and typed and state.dtype == mx.float32 and Dk % 32 == 0 and Dv % 4 == 0 and Hv % q.shape[2] == 0


def gated_delta_verify(
    q: mx.array, rows: Rows, state: mx.array, *, tape: Rows | None = None, accepted: Maybe = None, last: bool = False
) -> tuple[mx.array, mx.array]:
    """Process the first `accepted` rows of a tape, then new rows; return y and a state.

    q: [B, T, Hk, Dk]. rows: k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk], beta [B, T, Hv];
        float16, bfloat16 or float32, g and beta of any of them. g is the factor of the state, not its logarithm.
    state: [B, Hv, Dv, Dk] float32, before the tape.
    tape: P rows in the form of `rows`; those after the accepted may hold anything. None: no tape.
    accepted: [B], or [1] for all, int32, from 0 to P; ValueError unless it is given exactly if a tape is.

    y is [B, T, Hv, Dv] of the new rows, in q's dtype; the state is the one before them, with `last` after them.
    """
    check_tape(tape, accepted)
    if not (on_metal() and _supported(q, rows, state, tape)):
        return gated_delta_verify_ref(q, rows, state, tape=tape, accepted=accepted, last=last)
    (B, Hv, Dv, Dk), g = state.shape, rows[2]
    packed = Dk == 128 and Dv % 8 == 0 and g.ndim == 3 and g.dtype == mx.float32
    if tape is None or accepted is None:
        tape, accepted = rows, constants(mx.int32, 0)  # none of these rows is accepted
    taped = {f"tape_{name}": x for name, x in zip(NAMES, tape, strict=True)}
    inputs = {"state": state, **taped, "accepted": accepted, "last": constants(mx.int32, int(last)), "q": q}
    y, state = launch(
        "gated_delta_verify",
        {**inputs, **dict(zip(NAMES, rows, strict=True))},
        {"y": ((B, q.shape[1], Hv, Dv), q.dtype), "state_out": (state.shape, mx.float32)},
        template={"InT": q.dtype, "Dk": Dk, "LANES": 4 if packed else 32, "GATES": int(g.ndim == 4)},
        grid=(32, Dv // 8 if packed else Dv, B * Hv),
        group=(32, 2 if packed else 4, 1),
    )
    return y, state
