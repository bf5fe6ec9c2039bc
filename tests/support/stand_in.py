"""Replace `mx.fast.metal_kernel` by MLX's operations, which raise where a test makes Metal refuse a kernel.

OPS are supported: products of unquantized and 4-bit weights, sums and norms, LM heads.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import mlx.core as mx

from mlx_mtp.kernels import draw_ref, masked, top_ref
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.kernel_switch import ModelTrials

MESSAGE = (
    "[metal::Device] Unable to build metal library from source\n"
    "program_source:23:18: error: no matching function for call to 'rows_of'\n"
    "program_source:31:2: error: use of undeclared identifier 'sums'"
)
FIRST = "program_source:23:18: error: no matching function for call to 'rows_of'"


def rows_singly(product, x):
    """Return the product of each row computed alone, whose bits the kernels promise."""
    return mx.concatenate([product(x[i : i + 1]) for i in range(len(x))])


def add_norm(i, t, outputs):
    h = i["x"].reshape(outputs[0]) + i["r"].reshape(outputs[0])
    return [h, mx.fast.rms_norm(h, i["weight"], i["eps"].item())]


def verify_gemv(i, t, outputs):
    w, bias = i["w"].T, i["bias"]
    product = (lambda row: mx.addmm(bias, row, w)) if t["BIAS"] else (lambda row: row @ w)
    return [rows_singly(product, i["x"])]


def verify_dot(i, t, outputs):
    return [rows_singly(lambda row: row @ i["w"].T, i["x"])]


def quantized_logits(i, t):
    how = {"scales": i["scales"], "biases": i["biases"], "group_size": t["GROUP"], "bits": t["BITS"]}
    return rows_singly(lambda row: mx.quantized_matmul(row, i["w"], transpose=True, **how), i["x"])


def verify_qmm(i, t, outputs):
    ends = i["ends"].tolist()
    parts = mx.split(quantized_logits(i, t), ends[:-1], axis=1)
    return [mx.concatenate([part.flatten() for part in parts])]


def verify_glu(i, t, outputs):
    gate, up = mx.split(quantized_logits(i, t), 2, axis=1)
    limit = i["limit"].item()
    gate = mx.minimum(gate * mx.sigmoid(gate), limit)
    return [(gate * mx.clip(up, -limit, limit)).flatten()]


def verify_head_dense(i, t, outputs):
    return chosen(rows_singly(lambda row: row @ i["w"].T, i["x"]), i, t, outputs)


def verify_head(i, t, outputs):
    return chosen(quantized_logits(i, t), i, t, outputs)


def chosen(logits, i, t, outputs):
    """Return the outputs of an LM head with everything in the first tile, and the other tiles empty."""
    _, tiles, n = outputs[1]
    logits = logits + i["bias"] if t["BIAS"] else logits
    logits = masked(logits, i["mask"]) if t["MASK"] else logits
    if i["inverse"].item():
        tokens = draw_ref(logits, i["key"], i["position"], 1 / i["inverse"].item())[:, None]
        values, total = mx.zeros(tokens.shape), None
    else:
        values, tokens, total = top_ref(logits, n)
    values = mx.concatenate([values, total[:, None]], axis=1) if t["SUM"] else values
    nothing = [(0, 0), (0, tiles - 1), (0, 0)]
    return [
        mx.pad(values[:, None], nothing, constant_values=-float("inf")),
        mx.pad(tokens[:, None].astype(mx.int32), nothing),
    ]


def verify_head_merge(i, t, outputs):
    return [i["values"][:, 0], i["indices"][:, 0]]


OPS = {f.__name__: f for f in (add_norm, verify_gemv, verify_dot, verify_qmm, verify_glu)}
OPS |= {f.__name__: f for f in (verify_head_dense, verify_head, verify_head_merge)}


@dataclass(eq=False)
class StandIn:
    """A replacement of `mx.fast.metal_kernel`.

    refuses: (op, template by name) -> "construct", "call" or "evaluate", the step that raises, or None.
    calls: the ops that were launched.
    """

    refuses: Callable[[str, dict], str | None] = lambda op, template: None
    message: str = MESSAGE
    calls: list[str] = field(default_factory=list)

    def __call__(self, name, input_names, output_names, source, header="", **_):
        if self.refuses(name, {}) == "construct":
            raise ValueError(self.message)

        def call(*, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
            values = dict(template)
            self.calls.append(name)
            how = self.refuses(name, values)
            if how in ("construct", "call"):
                raise ValueError(self.message)
            given = {
                n: x if isinstance(x, mx.array) else mx.array(x) for n, x in zip(input_names, inputs, strict=True)
            }
            outputs = OPS[name](given, values, output_shapes)
            shaped = zip(outputs, output_shapes, output_dtypes, strict=True)
            made = [y.reshape(shape).astype(dtype) for y, shape, dtype in shaped]
            return [poisoned(y) for y in made] if how == "evaluate" else made

        return call


def poisoned(y: mx.array) -> mx.array:
    """Return an array equal to y whose evaluation raises in MLX."""
    zero = mx.zeros((1, 1, 1), mx.bfloat16)
    none = mx.gather_mm(zero, zero, rhs_indices=mx.array([0])).flatten()  # on a CPU, MLX supports only float32
    return y + none.astype(y.dtype)


@contextmanager
def standing_in(refuses=lambda op, template: None):
    """Context in which kernels can be launched and refused; yields the `StandIn`."""
    maker = StandIn(refuses)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx.fast, "metal_kernel", maker))
        stack.enter_context(mock.patch.object(mx.metal, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(mx, "default_device", return_value=mx.Device(mx.gpu)))
        yield maker


SITES = ("add_norm", "verify_gemv", "verify_qmm", "verify_glu", "verify_head")


def switched_on(model):
    """Return the model with all sites of SITES on for every row count."""
    if not model.runtime.sites:
        kernel_switch.place(model)
    sites = [site for site in model.runtime.sites if site.op in SITES]
    found = ModelTrials(model, sites)
    found.trials += kernel_switch.trials(sites, found.dtype, "together")
    on = kernel_switch.KernelVerdict(True, True, reason="asked for")
    found.verdicts = {trial.key: on for trial in found.trials}
    model.runtime.trials = found
    model.runtime.note(kernels=())
    kernel_switch.put_on(model, found)
    return model
