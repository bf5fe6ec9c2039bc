"""Share between ports the mixin in front of mlx-lm's Model, which adds MTP heads and the decode loop's contract."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cache.layer_cache import CacheKind
from .lm_head import Rows, head_on, logits_of
from .mtp_head import MTPHead
from .mtp_spec import MTPSpec
from .runtime import HasRuntime, Runtime

Tensors = dict[str, mx.array]  # by the names of a checkpoint, or the paths of parameters

# An MTP head's tensors as DeepSeek and its followers name them.
BLOCK_TENSORS = tuple((n, f"block.{n}") for n in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
NEXTN_TENSORS = (
    *((n, n) for n in ("enorm", "hnorm", "eh_proj", "embed_tokens")),
    ("shared_head.norm", "norm"),
    ("shared_head.head", "head"),
    *BLOCK_TENSORS,
)
# One layer of the trunk's kind behind the trunk, fed its own output again: DeepSeek's and GLM's heads.
NEXTN = MTPSpec(head="shared_or_own", embedding="shared_or_own", tensors=NEXTN_TENSORS)
MAX_RECYCLED = 15  # drafts that one recycled MTP head may make: a cycle's rows fit into a ring's slack
OUTSIDE = "outside."  # of an MTP head's block: norms, eh_proj and LM heads


class Renaming(NamedTuple):
    """A rule of what mlx-lm's sanitizing, which stacks, splits and dequantizes, does to tensors' names."""

    stored: str  # regex in a checkpoint's name
    becomes: tuple[str, ...]
    shown: str = ""  # `stored` as messages write it, where one of `becomes` is missing


NUMBERED_EXPERTS = Renaming(r"\.mlp\.experts\.\d+\.", (".mlp.switch_mlp.",), ".mlp.experts.*.")
MLA_KV_B = Renaming(r"\.kv_b_proj\.", (".embed_q.", ".unembed_out."), ".kv_b_proj.")
SCALED_FP8 = Renaming(r"\.weight_scale_inv$", (".weight",))


class Port(HasRuntime, nn.Module):
    """Mixin that makes mlx-lm's Model with `model.embed_tokens`, `model.layers` and `model.norm` a `target.Target`,
    where the methods that the decode loop calls are documented.

    A port sets SPEC and, where they differ from these, the class attributes below.
    """

    SPEC: MTPSpec
    BASE: Any  # whose `sanitize` is used: mlx-lm's Model behind this mixin, where a port names no other
    IGNORED: tuple[str, ...] = ()  # prefixes and suffixes of tensors that text decoding does not use
    IMPLIED: tuple[tuple[str, Any], ...] = ()  # keys of config.json, and what is implemented unread
    ZERO_CENTRED: tuple[str, str] | None = None  # regexes of names that only hub / only converted checkpoints have
    RENAMED: tuple[Renaming, ...] = ()  # what that sanitizing does to names, for messages
    NO_KV_BITS: str | None = None  # what forbids quantized keys and values
    MASK_ARRAY = False  # the layers want a mask as an array, never "causal"
    INSIDE = "model.layers.0."  # where BASE.sanitize, of a `one_layer()`, expects what a head's block has
    OURS: tuple[type, ...] = ()  # a mixin and one of mlx-lm's modules each, of which all become that
    MLP: tuple[type, ...] = ()  # mlx-lm's modules that are down(swiglu(gate(x), up(x))), clamped at their `limit`
    ROUTER: tuple[type, ...] = ()  # those that are a choice from `x @ weight.T`, and use x for nothing else
    ATTENTION: tuple[type, ...] = ()  # those with q_proj, k_proj and v_proj, and perhaps norms, RoPE and a gate
    MOE: tuple[type, ...] = ()  # sums of the experts that `gate` chooses and perhaps a shared one
    BLOCK: tuple[type, ...] = ()  # layers h = x + attention(norm(x)), then h + mlp(norm(h))
    NORM: tuple[type, ...] = (nn.RMSNorm,)  # mx.fast.rms_norm of their `weight` and `eps`

    args: Any
    model: Any
    layers: Any
    mtp: Sequence[Any]
    drafter: Any = None  # what drafts in place of the heads

    def __init_subclass__(cls) -> None:
        if not issubclass(behind := cls.__bases__[-1], Port):
            cls.BASE = behind

    def __init__(self, args: Any, heads: int = 0, spec: MTPSpec | None = None):
        """Make mlx-lm's model and `heads` MTP heads, described by `spec` (None: the family's)."""
        super().__init__(args)  # type: ignore[call-arg]
        self.runtime = Runtime()
        if self.ATTENTION and not getattr(args, "head_dim", None):
            args.head_dim = args.hidden_size // args.num_attention_heads
        self.spec, sizes = spec or self.SPEC, (self.model.norm, self.args.vocab_size)
        blocks = [self.head_block(depth) for depth in range(heads)]
        self.mtp = [MTPHead(self.spec, block, *sizes, mask_array=self.MASK_ARRAY) for block in blocks]
        ours = {kind.__bases__[-1]: kind for kind in self.OURS}
        for module in self.modules():
            module.__class__ = ours.get(type(module), type(module))

    def head_block(self, depth: int) -> nn.Module:
        """Make the decoder layer of an MTP head: by default the one that follows the target's last."""
        return self.BLOCK[0](self.args, self.args.num_hidden_layers + depth)

    @property
    def vocab_size(self) -> int:
        return self.args.vocab_size

    @property
    def language(self) -> Any:
        """The module that holds the LM head."""
        return self

    @property
    def max_draft_tokens(self) -> int:
        if self.drafter is not None:
            return self.drafter.most
        return MAX_RECYCLED if self.spec.topology == "recycle" and len(self.mtp) == 1 else len(self.mtp)

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return the rows that the first layer reads."""
        return self.model.embed_tokens(tokens)

    def hidden(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the residual stream before the final norm and, along the last axis, what `spec.capture` lists."""
        x, masks = self.embedded(tokens), {}
        stream = [x]
        for layer, c in zip(self.layers, cache, strict=True):
            kind = type(c), getattr(c, "ring", None)
            if kind not in masks:
                masks[kind] = c.make_mask(x.shape[1], return_array=self.MASK_ARRAY)
            x = layer(x, mask=masks[kind], cache=c)
            stream.append(x)
        return self.captured(stream)

    def captured(self, stream: list[mx.array]) -> mx.array:
        """Select what `hidden` returns from the residual stream before the first layer and after each."""
        return mx.concatenate([stream[-1], *(stream[i] for i in self.taps)], axis=-1) if self.taps else stream[-1]

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of layers behind which the residual stream is captured, too."""
        if self.drafter is not None:
            return self.drafter.reads
        return () if isinstance(self.spec.capture, str) else self.spec.capture

    def embed(self, tokens: mx.array, depth: int | None = 0) -> mx.array:
        head = None if depth is None else self.mtp[depth]
        return (self.model if head is None or "embed_tokens" not in head else head).embed_tokens(tokens)

    def unembedding(self, depth: int | None = None) -> Any:
        """Find the LM head, the embedding where the two are tied, or what the MTP head of `depth` has for its own."""
        if depth is not None and "head" in self["mtp"][depth]:
            return self["mtp"][depth]["head"]
        language = self.language
        if "lm_head" in language:
            return language["lm_head"]
        return self.model.embed_tokens

    def normed(self, hidden: mx.array) -> mx.array:
        """Norm hidden rows, as `hidden` returns them, for the LM head: [..., H]."""
        return self.model.norm(hidden[..., : self.model.norm.weight.size] if self.taps else hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        return logits_of(self.unembedding(), self.normed(hidden))

    def choice(self, hidden: mx.array) -> Rows | None:
        head = head_on(self.unembedding())
        return None if head is None else Rows(head, self.normed(hidden).flatten(0, 1))

    def capture(self, hidden: mx.array) -> mx.array:
        """Select or fuse what an MTP head reads of hidden rows: [..., H]."""
        if not isinstance(self.spec.capture, str):
            return self.mtp[0].fused(hidden[..., self.model.norm.weight.size :])
        return hidden if self.spec.capture == "pre" else self.model.norm(hidden)

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        return logits_of(self.unembedding(depth), self.mtp[depth].norm(output))

    def draft_choice(self, depth: int, output: mx.array) -> mx.array:
        rows = self.draft_rows(depth, output)
        if rows is None:
            return mx.argmax(self.draft_logits(depth, output), axis=-1).astype(mx.int32)
        return rows.greedy().reshape(output.shape[:2])

    def draft_rows(self, depth: int, output: mx.array) -> Rows | None:
        head = head_on(self.unembedding(depth))
        return None if head is None else Rows(head, self.mtp[depth].norm(output).flatten(0, 1))

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.model.norm.weight.size), self.model.norm.weight.dtype)

    def cached_layers(self) -> list[Any]:
        """List the layers that have a cache."""
        return list(self.layers)

    def windows(self) -> list[CacheKind]:
        """List the windows of `cached_layers`, None for all positions, or their kinds of cache."""
        return [None] * len(self.layers)

    def head_windows(self) -> list[CacheKind]:
        return [*self.drafter.windows] if self.drafter is not None else [head.window for head in self.mtp]

    def renamed(self, name: str) -> list[str]:
        """List the parameter paths that checkpoint tensor `name` becomes; none where it is dropped."""
        head = self.spec.locate(name, self.args.num_hidden_layers)
        names = [name if head is None else f"mtp.{head[0]}.{head[1]}"]
        if head is None and name.endswith("lm_head.weight") and getattr(self.args, "tie_word_embeddings", False):
            names = [name.replace("lm_head", "model.embed_tokens")]
        for rule in self.RENAMED:
            names = list(dict.fromkeys(re.sub(rule.stored, new, n) for n in names for new in rule.becomes))
        return names

    def unrenamed(self, path: str) -> str:
        """Write a parameter's path with what sanitizing renamed as the checkpoint has it."""
        for rule in self.RENAMED:
            for new in rule.becomes if rule.shown else ():
                path = path.replace(new, rule.shown)
        return path

    def sanitized(self, trunk: Tensors, heads: Tensors, *, shift_trunk: bool, shift_heads: bool) -> Tensors:
        """Turn checkpoint tensors into parameters. Where norms are stored zero-centred, mlx-lm shifts the trunk's by
        +1; the heads' are kept from it, for it may judge them otherwise, and shifted here.
        """
        layers, centred = self.args.num_hidden_layers, self.ZERO_CENTRED is not None
        places = {name: self.spec.locate(name, layers) for name in heads}
        kept = {n: place for n, place in places.items() if centred and place and place[1].endswith("norm.weight")}
        parameters = self.sanitized_heads({name: w for name, w in heads.items() if name not in kept})
        for name, (depth, path) in kept.items():
            parameters[f"mtp.{depth}.{path}"] = heads[name] + 1 if shift_heads else heads[name]
        return self.BASE.sanitize(self, trunk) | parameters

    def one_layer(self) -> Any:
        """Make what BASE.sanitize sees as `self` when it is given a single layer."""
        return SimpleNamespace(args=replace(self.args, num_hidden_layers=1))

    def sanitized_heads(self, heads: Tensors) -> Tensors:
        """Apply mlx-lm's sanitizing (experts, fp8, MLA) of one layer to each depth; KeyError names what it misses."""
        depths: dict[int, Tensors] = {}
        for name, w in heads.items():
            depth, path = self.spec.locate(name, self.args.num_hidden_layers)  # type: ignore[misc]
            inside = path.removeprefix("block.")
            depths.setdefault(depth, {})[self.INSIDE + (OUTSIDE if inside == path else "") + inside] = w
        one_layer = self.one_layer()
        parameters = {}
        for depth, tensors in depths.items():
            try:
                block = self.BASE.sanitize(one_layer, tensors)
            except KeyError as e:  # mlx-lm takes for granted what it stacks or splits
                raise KeyError(f"mtp.{depth}.block." + str(e.args[0]).partition(self.INSIDE)[2]) from None
            for name, w in block.items():
                inside = name.partition(self.INSIDE)[2]  # a wrapper's sanitizing puts its own prefix in front
                path = inside.removeprefix(OUTSIDE) if inside.startswith(OUTSIDE) else f"block.{inside}"
                parameters[f"mtp.{depth}.{path}"] = w
        return parameters


class HeadlessPort(Port):
    """A family whose checkpoints have no MTP heads: the target of a drafter, or decoded plainly."""

    SPEC = MTPSpec(tensors=())  # no tensor of the checkpoint is an MTP head's

    def __init__(self, args: Any, heads: int = 0, spec: MTPSpec | None = None):
        super().__init__(args, 0, spec)
