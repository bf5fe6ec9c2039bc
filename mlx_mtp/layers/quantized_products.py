"""Products whose rows have, in a verify of a few, the bits that each has alone, in the place of MLX's modules.

A site is one launch: the product, MLX's own of the same modules (`stock`), and the row counts for which it is on.
Modules become subclasses of what they were, so that parameters keep their names and the port's code its calls.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Quantized, verify_gemv, verify_glu, verify_qmm, verify_qmm_mma, verify_qmm_ref

VERIFY_ROWS = range(2, 9)


def rows_of(x: mx.array) -> int:
    return x.size // x.shape[-1]


class Stack:
    """Quantized linears that read the same x, stacked along N. Their own weights become views of the stack.

    So do their biases where each has one, of one type; else those that there are are added to the products.
    """

    op = "verify_qmm"

    def __init__(self, modules: Sequence[Any]):
        self.modules, self.rows, self.matrix_rows = list(modules), frozenset(), frozenset()
        self.read: tuple[mx.array | None, list[Any]] = (None, [])
        self._stack()

    def _stack(self) -> None:
        first = self.modules[0]
        ends = tuple(itertools.accumulate(module.scales.shape[0] for module in self.modules))
        whole: dict[str, Any] = {name: first.get(name) for name in ("weight", "scales", "biases")}
        types = {None if (bias := module.get("bias")) is None else bias.dtype for module in self.modules}
        self.mixed = len(types) > 1
        whole["bias"] = None if self.mixed else first.get("bias")
        stored = [name for name, array in whole.items() if array is not None]
        if len(self.modules) > 1:
            whole |= {name: mx.concatenate([module[name] for module in self.modules]) for name in stored}
            for module, a, b in zip(self.modules, (0, *ends), ends, strict=False):
                module.update({name: whole[name][a:b] for name in stored})
            mx.eval(whole, [module.parameters() for module in self.modules])
            mx.clear_cache()  # what they were before has sizes that nothing else asks for
        watched = dict.fromkeys((*stored, "bias"))
        self.parts = [(module, name, module.get(name)) for module in self.modules for name in watched]
        form = first.group_size, first.bits, first.mode
        self.stacked = Quantized(whole["weight"], whole["scales"], whole["biases"], *form, ends, whole["bias"])

    @property
    def weights(self) -> Quantized:
        """Those that the linears have now: weights loaded or cast since they were stacked are stacked again."""
        for module, name, array in self.parts:
            if module.get(name) is not array:
                self._stack()
                break
        return self.stacked

    @property
    def shape(self) -> str:
        w = self.weights
        parts = "+".join(str(b - a) for a, b in zip((0, *w.ends), w.ends, strict=False))
        bias = " with bias" if w.bias is not None else " with some biases" if self.mixed else ""
        return f"{parts}x{w.k} {w.bits}-bit {w.mode} g{w.group_size}{bias}"

    @property
    def width(self) -> int:
        return self.weights.k

    @property
    def candidates(self) -> tuple[int, ...]:
        """The row counts to try; several linears are one launch for a single row, too."""
        return (*([1] if len(self.modules) > 1 else []), *VERIFY_ROWS)

    def ours(self, x: mx.array) -> list[mx.array]:
        if rows_of(x) in self.matrix_rows:
            return self.biased(verify_qmm_mma(x, self.weights))
        if rows_of(x) > 1:
            return self.biased(verify_qmm(x, self.weights))
        w = self.weights
        y = mx.quantized_matmul(x, w.w, scales=w.scales, biases=w.biases, transpose=True, **w.format)
        y = y if w.bias is None else y + w.bias
        return self.biased(list(mx.split(y, list(w.ends[:-1]), axis=-1)))

    def biased(self, products: list[mx.array]) -> list[mx.array]:
        """The products, plus the biases that are not stacked."""
        if not self.mixed:
            return products
        return [y if m.get("bias") is None else y + m.bias for m, y in zip(self.modules, products, strict=True)]

    def stock(self, x: mx.array) -> list[mx.array]:
        format_, parts = self.weights.format, [(m.weight, m.scales, m.get("biases")) for m in self.modules]
        found = [mx.quantized_matmul(x, w, scales=s, biases=b, transpose=True, **format_) for w, s, b in parts]
        return [y if m.get("bias") is None else y + m.bias for m, y in zip(self.modules, found, strict=True)]

    def part(self, x: mx.array, index: int) -> mx.array:
        """The product of the linear `index`; the others' are kept for who asks with the same x, and then let go."""
        read, parts = self.read
        y = parts[index] if read is x else None
        if y is None:
            parts: list[Any] = list(self.ours(x))
            y, self.read = parts[index], (x, parts)
        parts[index] = None
        if not any(part is not None for part in parts):
            self.read = (None, [])
        return y


class Matrices:
    """A Stack's product by matrices, at the row counts where that is faster than its exact kernel; its own bits."""

    op = "verify_qmm_mma"
    candidates = (5, 6, 7, 8)
    bits = False

    def __init__(self, stack: Stack):
        self.stack = stack

    @property
    def rows(self) -> frozenset[int]:
        return self.stack.matrix_rows

    @rows.setter
    def rows(self, rows: frozenset[int]) -> None:
        self.stack.matrix_rows = rows
        self.stack.rows |= rows

    @property
    def shape(self) -> str:
        return self.stack.shape

    @property
    def width(self) -> int:
        return self.stack.width

    def ours(self, x: mx.array) -> list[mx.array]:
        return self.stack.biased(verify_qmm_mma(x, self.stack.weights))

    def stock(self, x: mx.array) -> list[mx.array]:
        """What it has to be faster than, and half as accurate as: the exact kernel, whose bits are MLX's."""
        return self.stack.biased(verify_qmm(x, self.stack.weights))

    def truth(self, x: mx.array) -> list[mx.array]:
        return self.stack.biased(verify_qmm_ref(x.astype(mx.float32), self.stack.weights))


class VerifyLinear(nn.QuantizedLinear):
    """One of a Stack."""

    site: Stack
    index: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.site.part(x, self.index) if rows_of(x) in self.site.rows else super().__call__(x)


class VerifyEmbedding(nn.QuantizedEmbedding):
    """The LM head of a model that ties it to its embedding."""

    site: Stack

    def as_linear(self, x: mx.array) -> mx.array:
        return self.site.part(x, 0) if rows_of(x) in self.site.rows else super().as_linear(x)


class GLU:
    """Gate, up and SwiGLU of an MLP in one launch."""

    op = "verify_glu"
    candidates = (1, *VERIFY_ROWS)
    stock_exact = True

    def __init__(self, mlp: Any):
        self.mlp, self.rows = mlp, frozenset()
        self.stack: Stack = mlp.gate_proj.site
        self.covers = self.stack
        self.limit: float | None = mlp.limit if hasattr(mlp, "limit") else None

    @property
    def shape(self) -> str:
        return self.stack.shape + ("" if self.limit is None else f" limit {self.limit:g}")

    @property
    def width(self) -> int:
        return self.stack.width

    def serves(self, x: mx.array) -> bool:
        """Not where gate or up has been replaced since, as by an adapter, or is faster by matrices."""
        gate, up = self.stack.modules
        return (
            rows_of(x) in self.rows - self.stack.matrix_rows and self.mlp.gate_proj is gate and self.mlp.up_proj is up
        )

    def ours(self, x: mx.array) -> list[mx.array]:
        return [verify_glu(x, self.stack.weights, self.limit)]

    def stock(self, x: mx.array) -> list[mx.array]:
        gate, up = self.stack.stock(x)
        gate = nn.silu(gate)
        if self.limit is not None:
            gate, up = mx.clip(gate, None, self.limit), mx.clip(up, -self.limit, self.limit)
        return [gate * up]


class VerifyMLP:
    """Mixin in front of an MLP that is down(swiglu(gate(x), up(x))), clamped where it has a `limit`."""

    glu: GLU

    def __call__(self: Any, x: mx.array) -> mx.array:
        if not self.glu.serves(x):
            return super().__call__(x)  # type: ignore[misc]
        return self.down_proj(self.glu.ours(x)[0])


class Dense:
    """An unquantized product."""

    op = "verify_gemv"
    candidates = tuple(VERIFY_ROWS)

    def __init__(self, module: Any):
        self.module, self.rows = module, frozenset()

    @property
    def shape(self) -> str:
        n, k = self.module.weight.shape
        dtype = str(self.module.weight.dtype).rpartition(".")[2]
        return f"{n}x{k} {dtype}" + (" with bias" if "bias" in self.module else "")

    @property
    def width(self) -> int:
        return self.module.weight.shape[1]

    def ours(self, x: mx.array) -> list[mx.array]:
        return [verify_gemv(x, self.module.weight, self.module.get("bias"))]

    def stock(self, x: mx.array) -> list[mx.array]:
        if "bias" in self.module:
            return [mx.addmm(self.module.bias, x, self.module.weight.T)]
        return [x @ self.module.weight.T]


class Recurrence:
    """What a gated-delta layer is between its projections: convolution, norms, gates and recurrence.

    Rows depend on those before them: `alone` is what mlx-lm's one-row steps give for them, one after the other.
    `make_cache` makes a layer's cache, empty.
    """

    op = "gated_delta_verify"
    candidates = (1, *VERIFY_ROWS)
    PROMPT, TAPE, ACCEPTED = 5, 4, 2  # rows before those that are tried

    def __init__(self, layer: Any, make_cache: Callable[[], Any]):
        self.layer, self.make_cache = layer, make_cache
        self.ends = list(itertools.accumulate((layer.conv_dim, layer.value_dim, layer.num_v_heads)))
        self.before: list[Any] = []

    @property
    def rows(self) -> frozenset[int]:
        return self.layer.verify_rows

    @rows.setter
    def rows(self, rows: frozenset[int]) -> None:
        self.layer.verify_rows, self.before = rows, []

    @property
    def shape(self) -> str:
        a = self.layer
        return f"{a.num_k_heads}x{a.head_k_dim} {a.num_v_heads}x{a.head_v_dim} taps {a.conv_kernel_size}"

    @property
    def width(self) -> int:
        return self.ends[-1] + self.layer.num_v_heads

    def ours(self, x: mx.array) -> list[mx.array]:
        return [self._read(self.layer.fused, x, self._cache(x, tape=True))]

    def stock(self, x: mx.array) -> list[mx.array]:
        return [self._read(self.layer.plain, x, self._cache(x, tape=True))]

    def alone(self, x: mx.array) -> list[mx.array]:
        cache = self._cache(x, tape=False)
        return [mx.concatenate([self._read(self.layer.plain, x[i : i + 1], cache) for i in range(len(x))])]

    def _read(self, path: Callable[..., mx.array], x: mx.array, cache: Any) -> mx.array:
        """Rows x [M, width] through a path of the layer: [M, Hv * Dv]."""
        qkv, z, b, a = mx.split(x[None], self.ends, axis=-1)
        z = z.reshape(1, len(x), self.layer.num_v_heads, self.layer.head_v_dim)
        return path(qkv, z, b, a, cache).reshape(len(x), -1)

    def _cache(self, x: mx.array, *, tape: bool) -> Any:
        """A cache that has read a few rows, the last of them on a tape of which some are accepted, or all singly."""
        if not self.before:
            rows = mx.random.normal((self.PROMPT + self.TAPE, self.width), x.dtype, key=mx.random.key(0))
            end = self.PROMPT + self.ACCEPTED
            single, verified = self.make_cache(), self.make_cache()
            for i in range(end):
                self._read(self.layer.plain, rows[i : i + 1], single)
            self._read(self.layer.plain, rows[: self.PROMPT], verified)
            verified.seek(mx.array([self.PROMPT]), self.PROMPT)
            self._read(self.layer.plain, rows[self.PROMPT :], verified)
            verified.seek(mx.array([end]), end + self.TAPE - self.ACCEPTED)
            self.before = [single, verified]
            mx.eval(single.parts, verified.parts)
        return copy.copy(self.before[tape])


class VerifyDense(nn.Linear):
    site: Dense

    def __call__(self, x: mx.array) -> mx.array:
        return self.site.ours(x)[0] if rows_of(x) in self.site.rows else super().__call__(x)


class VerifyDenseEmbedding(nn.Embedding):
    site: Dense

    def as_linear(self, x: mx.array) -> mx.array:
        return self.site.ours(x)[0] if rows_of(x) in self.site.rows else super().as_linear(x)


class _Rows:
    """Stands for x in a router's `x @ weight.T`."""

    def __init__(self, x: mx.array):
        self.x = x

    def __matmul__(self, w: mx.array) -> mx.array:
        return verify_gemv(self.x, w.T)


class VerifyRouter:
    """Mixin in front of a router that is a selection from `x @ weight.T` and uses x for nothing else."""

    site: Dense

    def __call__(self: Any, x: mx.array) -> Any:
        return super().__call__(_Rows(x) if rows_of(x) in self.site.rows else x)  # type: ignore[misc]
