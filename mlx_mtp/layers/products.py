"""Multiply a verify's few rows by weights, quantized or not; each row has the bits of a one-row call.

MLX picks another kernel, and so other bits, when the number of rows changes; these products do not. Modules become
subclasses of their class, so that parameter names and the port's calls stay valid.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import (
    Quantized,
    matrix_gemv,
    matrix_glu,
    matrix_qmm,
    multiplied,
    splits,
    stock_product,
    verify_gemv,
    verify_glu,
    verify_glu_ref,
    verify_qmm,
    verify_qmm_ref,
)
from .kernel_site import VERIFY_ROWS, Site, format_of, quantized, rows_of
from .scaled import SCALE, finished, widened


class Stack(Site):
    """One quantized linear layer, or several that read the same x, stacked along N.

    The weights of several become views of the stack. Biases are stacked too if each layer has one of the same type,
    and none an output scale; otherwise they are added to the products.
    """

    op = "verify_qmm"

    def __init__(self, modules: Sequence[Any]):
        self.modules = list(modules)
        self.read: tuple[mx.array | None, list[Any]] = (None, [])
        self._stack()
        w = self.stacked
        self.width = w.k
        heights = "+".join(str(module.scales.shape[0]) for module in self.modules)
        bias = " with bias" if w.bias is not None else " scaled" * self.scaled or " with some biases" * self.mixed
        self.shape = f"{heights}x{w.k} {format_of(w)}{bias}"
        self.kind, self.weights_read = w.kind + (", stacked" if len(self.modules) > 1 else ""), w.k * w.ends[-1]

    def _stack(self) -> None:
        first = self.modules[0]
        ends = tuple(itertools.accumulate(module.scales.shape[0] for module in self.modules))
        whole: dict[str, Any] = {name: first.get(name) for name in ("weight", "scales", "biases")}
        types = {None if (bias := module.get("bias")) is None else bias.dtype for module in self.modules}
        self.scaled = any(module.get(SCALE) is not None for module in self.modules)
        self.mixed = len(types) > 1 or self.scaled
        whole["bias"] = None if self.mixed else first.get("bias")
        stored = [name for name, array in whole.items() if array is not None]
        if len(self.modules) > 1:
            whole |= {name: mx.concatenate([module[name] for module in self.modules]) for name in stored}
            for module, a, b in zip(self.modules, (0, *ends), ends, strict=False):
                module.update({name: whole[name][a:b] for name in stored})
            mx.eval(whole, [module.parameters() for module in self.modules])
            mx.clear_cache()  # freed arrays of these sizes would not be reused
        watched = dict.fromkeys((*stored, "bias"))
        self.parts = [(module, name, module.get(name)) for module in self.modules for name in watched]
        form = first.group_size, first.bits, first.mode
        self.stacked = Quantized(whole["weight"], whole["scales"], whole["biases"], *form, ends, whole["bias"])

    @property
    def weights(self) -> Quantized:
        """The current weights; layers loaded or cast since the last call are stacked again."""
        if any(module.get(name) is not array for module, name, array in self.parts):
            self._stack()
        return self.stacked

    @property
    def candidates(self) -> tuple[int, ...]:  # type: ignore[override]
        """Row counts to try; several layers save launches even for a single row."""
        return (*([1] if len(self.modules) > 1 else []), *VERIFY_ROWS)

    def splits(self, rows: int) -> bool:
        return not self.matrix and splits(rows)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        w, dtype, x = self.weights, x.dtype, self.widened(x)
        if rows_of(x) > 1:
            return self.biased(verify_qmm(x, w, split=split), dtype)
        y = stock_product(x, w)
        y = y if w.bias is None else y + w.bias
        return self.biased(list(mx.split(y, list(w.ends[:-1]), axis=-1)), dtype)

    def stock(self, x: mx.array) -> list[mx.array]:
        wide = self.widened(x)
        return self._finished([stock_product(wide, quantized(m)) for m in self.modules], x.dtype)

    def in_float32(self, x: mx.array) -> list[mx.array]:
        """Return the layers' outputs for x [..., K], computed in float32, a float32 array [..., n] for each layer."""
        return self.biased(verify_qmm_ref(x.astype(mx.float32), self.weights), mx.float32)

    def widened(self, x: mx.array) -> mx.array:
        """Return x; but if any layer has an output scale, x in float16 is returned in float32 (`scaled.widened`)."""
        return widened(x) if self.scaled else x

    def biased(self, products: list[mx.array], dtype: mx.Dtype) -> list[mx.array]:
        """Apply the output scales, and add the biases that are not stacked, to the products [..., N_i]."""
        return self._finished(products, dtype) if self.mixed else products

    def _finished(self, products: list[mx.array], dtype: mx.Dtype) -> list[mx.array]:
        return [finished(m, y, dtype) for m, y in zip(self.modules, products, strict=True)]

    def part(self, x: mx.array, index: int) -> mx.array:
        """Return layer `index`'s product; the others are kept until each was read with this array x, or x changes."""
        read, parts = self.read
        y = parts[index] if read is x else None
        if y is None:
            parts: list[Any] = list(self.ours(x))
            y, self.read = parts[index], (x, parts)
        parts[index] = None
        if not any(part is not None for part in parts):
            self.read = (None, [])
        return y


class OwnStack(Stack):
    """A Stack whose single row, too, has our kernel's bits: in a block format, and in the lane `matrix`."""

    candidates = (1, *VERIFY_ROWS)  # type: ignore[assignment]
    own_bits = True
    truth = Stack.in_float32

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        w, dtype, x = self.weights, x.dtype, self.widened(x)
        return self.biased(matrix_qmm(x, w) if self.matrix else verify_qmm(x, w, split=split), dtype)


class GLU(Site):
    """Gate, up and SwiGLU of an MLP in one launch; with a `limit`, silu(gate) is at most that, up within ±limit."""

    op = "verify_glu"
    stock_exact = True

    def __init__(self, mlp: Any):
        self.mlp, self.stack = mlp, mlp.gate_proj.site
        self.covers, self.width = self.stack, self.stack.width
        self.limit: float | None = getattr(mlp, "limit", None)
        self.shape = self.stack.shape + ("" if self.limit is None else f" limit {self.limit:g}")
        self.kind, self.weights_read = self.stack.kind, self.stack.weights_read

    def serves(self, x: mx.array) -> bool:
        """Return whether the site is on for x; False if gate or up was replaced."""
        same = all(map(operator.is_, (self.mlp.gate_proj, self.mlp.up_proj), self.stack.modules))
        return same and rows_of(x) in self.rows

    def splits(self, rows: int) -> bool:
        return not self.matrix and splits(rows)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return [verify_glu(x, self.stack.weights, self.limit, split=split)]

    def stock(self, x: mx.array) -> list[mx.array]:
        gate, up = self.stack.stock(x)
        gate = nn.silu(gate)
        if self.limit is not None:
            gate, up = mx.clip(gate, None, self.limit), mx.clip(up, -self.limit, self.limit)
        return [gate * up]


class OwnGLU(GLU):
    """A GLU with our kernel's bits (see `OwnStack`); trials compare with a GLU in float32."""

    own_bits = True

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return [matrix_glu(x, self.stack.weights, self.limit)] if self.matrix else super().computed(x, split)

    def truth(self, x: mx.array) -> list[mx.array]:
        return [verify_glu_ref(x.astype(mx.float32), self.stack.weights, self.limit)]


class VerifyMLP:
    """Mixin for an MLP, down(swiglu(gate(x), up(x))), that runs its `glu` where it is on."""

    glu: GLU

    def __call__(self: Any, x: mx.array) -> mx.array:
        on = self.glu.serves(x)
        return self.down_proj(self.glu.ours(x)[0]) if on else super().__call__(x)  # type: ignore[misc]


class Dense(Site):
    """The product of an unquantized module: a linear layer, an embedding as LM head, or a router."""

    op = "verify_gemv"
    candidates = tuple(VERIFY_ROWS)

    def __init__(self, module: Any):
        self.module = module
        n, self.width = module.weight.shape
        dtype = str(module.weight.dtype).rpartition(".")[2]
        self.shape = f"{n}x{self.width} {dtype}" + (" with bias" if "bias" in module else "")

    def part(self, x: mx.array, index: int) -> mx.array:
        """Return the product of the module, its only part."""
        return self.product(x, self.module.weight, self.module.get("bias"))

    @staticmethod
    def product(x: mx.array, w: mx.array, bias: mx.array | None) -> mx.array:
        return verify_gemv(x, w, bias)

    def ours(self, x: mx.array) -> list[mx.array]:
        return [self.part(x, 0)]

    def stock(self, x: mx.array) -> list[mx.array]:
        if "bias" in self.module:
            return [mx.addmm(self.module.bias, x, self.module.weight.T)]
        return [x @ self.module.weight.T]


class OwnDense(Dense):
    """A Dense in the lane `matrix`: its rows have our kernel's bits."""

    own_bits = True
    candidates = (1, *VERIFY_ROWS)

    @staticmethod
    def product(x: mx.array, w: mx.array, bias: mx.array | None) -> mx.array:
        return matrix_gemv(x, w, bias)

    def truth(self, x: mx.array) -> list[mx.array]:
        y = multiplied(x.astype(mx.float32), self.module.weight)
        return [y + self.module.bias if "bias" in self.module else y]


class VerifyLinear:
    """Mixin for a linear layer, quantized or not, that runs part `index` of its site where the site is on."""

    site: Stack | Dense
    index = 0

    def __call__(self, x: mx.array) -> mx.array:
        on = rows_of(x) in self.site.rows
        return self.site.part(x, self.index) if on else super().__call__(x)  # type: ignore[misc]


class VerifyEmbedding:
    """Mixin for an embedding, quantized or not, whose product as LM head runs its site where that is on."""

    site: Stack | Dense

    def as_linear(self, x: mx.array) -> mx.array:
        on = rows_of(x) in self.site.rows
        return self.site.part(x, 0) if on else super().as_linear(x)  # type: ignore[misc]


class _Rows:
    """Replaces x in a router's `x @ weight.T` to run our kernel."""

    def __init__(self, x: mx.array):
        self.x = x

    def __matmul__(self, w: mx.array) -> mx.array:
        return verify_gemv(self.x, w.T)


class VerifyRouter:
    """Mixin for a router that uses x only in `x @ weight.T`; it runs our kernel there where its site is on."""

    site: Dense

    def __call__(self: Any, x: mx.array) -> Any:
        return super().__call__(_Rows(x) if rows_of(x) in self.site.rows else x)  # type: ignore[misc]
