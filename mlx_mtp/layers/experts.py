"""Run a mixture of experts, from its router's logits on, in three launches instead of mlx-lm's modules."""

import operator
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from ..kernels import Experts, Routing, moe_splits, route_ref, verify_moe, verify_moe_ref
from .kernel_site import Site, format_of, known_format, quantized, rows_of

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
UNGATED = ("fc1", "fc2")  # with a squared ReLU
SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
PER_TOKEN = ("top_k", "num_experts_per_tok", "moe_top_k")  # the number of experts per token in mlx-lm's routers
SHARED = ("shared_experts", "share_expert", "shared_expert")


def routing_of(block: Any) -> Routing:
    """Return the `Routing` of a block's router: softmax if `gate` is a linear layer, else sigmoid.

    For sigmoid 1e-20 is added to the denominator; families that do not add it differ only where it is 0.
    """
    gate = block.gate
    if not hasattr(gate, "routed_scaling_factor"):  # a linear layer, or an adapter around one
        return Routing("softmax", block.top_k, norm=block.norm_topk_prob)
    groups = {"n_group": gate.n_group, "topk_group": gate.topk_group} if hasattr(gate, "n_group") else {}
    norm = gate.norm_topk_prob and (gate.top_k > 1 or not groups)
    return Routing("sigmoid", gate.top_k, **groups, norm=norm, eps=1e-20, scale=gate.routed_scaling_factor)


def expert_counts(modules: Iterable[Any]) -> tuple[int, int] | None:
    """Return (experts, experts per token), each the first among a model's modules; None if either is missing."""
    modules = list(modules)
    experts = next((m.num_experts for m in modules if isinstance(m, SWITCHES)), None)
    used = next((n for m in modules for name in PER_TOKEN if isinstance(n := getattr(m, name, None), int)), None)
    return (experts, used) if experts and used else None


def projections(switch: Any) -> tuple[str, ...]:
    """Return the names of the linear layers of a block's experts."""
    return UNGATED if UNGATED[0] in switch else PROJECTIONS


def servable(block: Any) -> bool:
    """Return whether the kernels support the block's experts.

    They must be quantized in supported formats, have no `bias`, and be SwiGLUs, with gate and up in one format, or
    squared ReLUs.
    """
    switch = block.switch_mlp
    linears = [switch[name] for name in projections(switch)]
    if not all(isinstance(m, QuantizedSwitchLinear) and "bias" not in m and known_format(m) for m in linears):
        return False
    if len(linears) == len(UNGATED):
        return type(switch.activation) is nn.ReLU2
    swiglu = type(switch.activation) is SwiGLU or hasattr(switch.activation, "limit")
    return swiglu and format_of(linears[0]) == format_of(linears[1])


class Mixture(Site):
    """The routed experts of a block; its x are rows and the router's logits, concatenated: [M, H + E]."""

    op = "verify_moe"
    own_bits = stock_exact = True

    def __init__(self, block: Any):
        self.block, self.routing = block, routing_of(block)
        self.limit: float | None = getattr(block.switch_mlp.activation, "limit", None)
        self.names = projections(block.switch_mlp)
        self.linears = [block.switch_mlp[name] for name in self.names]
        gate, down, routing = self.linears[0], self.linears[-1], self.routing
        dims = f"{gate.num_experts}x{gate.output_dims}x{gate.input_dims}" + ("" if len(self.names) > 2 else " relu²")
        formats = "/".join(dict.fromkeys(map(format_of, (gate, down))))
        groups = f" of {routing.topk_group}/{routing.n_group} groups" if routing.n_group > 1 else ""
        limit = "" if self.limit is None else f" limit {self.limit:g}"
        self.kind = f"{dims} {formats} {routing.kind} top {routing.top_k}{groups}"
        self.shape = self.kind + limit
        self.width, self.ends = gate.input_dims + gate.num_experts, [gate.input_dims]
        self.parts: list[mx.array | None] = []
        self.made: Experts | None = None

    def serves(self, x: mx.array) -> bool:
        """Return whether the site is on for x; False if a projection was replaced, as by an adapter, or sharded."""
        switch = self.block.switch_mlp
        same = all(map(operator.is_, map(switch.get, self.names), self.linears))
        return rows_of(x) in self.rows and same and getattr(self.block, "sharding_group", None) is None

    @property
    def bias(self) -> mx.array | None:
        """Bias [E] that the router adds to its scores for choosing only; None if it has none."""
        gate = self.block.gate
        bias = gate.get("e_score_correction_bias")
        return gate.get("router_bias") if bias is None else bias

    @property
    def experts(self) -> Experts:
        """The projections' current weights, as the kernels' `Experts`."""
        parts = [linear.get(name) for linear in self.linears for name in ("weight", "scales", "biases")]
        if self.made is None or not all(map(operator.is_, parts, self.parts)):
            *gate, up, down = map(quantized, self.linears)
            self.parts, self.made = parts, Experts(gate[0] if gate else None, up, down)
        return self.made

    def logits(self, x: mx.array) -> mx.array:
        """Compute the router's logits [M, E] of x [M, H]."""
        router = self.block.gate
        if self.routing.kind == "softmax":
            return router(x)
        if "gate" in router:
            return router.gate(x)
        site = getattr(router, "site", None)
        return site.part(x, 0) if site is not None and rows_of(x) in site.rows else x @ router.weight.T

    def fused(self, x: mx.array, logits: mx.array, **shared: mx.array | None) -> mx.array:
        """Return the weighted sum [M, H] of the chosen experts' outputs for x [M, H] and the router's logits [M, E].

        shared, shared_gate: the shared expert's output [M, H], which is added, and logits [M, 1] that gate it.
        """
        return self._summed(x, logits, rows_of(x) in self.split, **shared)

    def _summed(self, x: mx.array, logits: mx.array, split: bool, **shared: Any) -> mx.array:
        own: dict[str, Any] = {"bias": self.bias, "limit": self.limit, "split": split}
        return verify_moe(x, logits, self.experts, self.routing, **own, **shared)

    def splits(self, rows: int) -> bool:
        return moe_splits(rows)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        x, logits = mx.split(x, self.ends, axis=-1)
        return [self._summed(x, logits, split)]

    def truth(self, x: mx.array) -> list[mx.array]:
        x, logits = mx.split(x, self.ends, axis=-1)
        more = {"bias": self.bias, "limit": self.limit}
        return [verify_moe_ref(x.astype(mx.float32), logits, self.experts, self.routing, **more)]

    def stock(self, x: mx.array) -> list[mx.array]:
        x, logits = mx.split(x, self.ends, axis=-1)
        chosen, weights = route_ref(logits, self.routing, self.bias)
        y = self.block.switch_mlp(x, chosen)
        return [(y * weights[..., None]).sum(axis=-2).astype(y.dtype)]


class VerifyMoE:
    """Mixin for a block that sums chosen experts and an optional shared one; it runs `mixture` where that is on."""

    mixture: Mixture

    def __call__(self: Any, x: mx.array) -> mx.array:
        if not self.mixture.serves(x):
            return super().__call__(x)  # type: ignore[misc]
        rows = x.reshape(-1, x.shape[-1])
        name = next((name for name in SHARED if self.get(name) is not None), None)
        shared = None if name is None else self[name](rows)
        gate = self.shared_expert_gate(rows) if "shared_expert_gate" in self else None
        if "fc1_latent_proj" in self:  # the experts read a narrower projection; the shared expert reads the rows
            y = self.fc2_latent_proj(self.mixture.fused(self.fc1_latent_proj(rows), self.mixture.logits(rows)))
            return (y if shared is None else y + shared).reshape(x.shape)
        return self.mixture.fused(rows, self.mixture.logits(rows), shared=shared, shared_gate=gate).reshape(x.shape)
