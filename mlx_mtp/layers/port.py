"""Define the mixin for mlx-lm's Model that adds MTP heads and the interface of the decode loop."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cache.layer_cache import CacheKind
from .mtp_head import MTPHead
from .mtp_spec import MTPSpec, pairs
from .prompt_rows import NO_ROWS, PromptRows
from .runtime import HasRuntime, Runtime
from .three_axes import add_axes, on_axes
from .with_heads import TUNED, TUNED_PREFIX, WithHeads

Tensors = dict[str, mx.array]  # by checkpoint name or by parameter path

# An MTP head's tensors under the names of DeepSeek and its derivatives.
BLOCK_TENSORS = tuple((n, f"block.{n}") for n in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
NEXTN_TENSORS = pairs("enorm hnorm eh_proj embed_tokens shared_head.norm=norm shared_head.head=head") + BLOCK_TENSORS
# One layer of the trunk's kind after the trunk, which reads its own output: the heads of DeepSeek and GLM.
NEXTN = MTPSpec(head="shared_or_own", embedding="shared_or_own", tensors=NEXTN_TENSORS)
OUTSIDE = "outside."  # prefix of head tensors outside its block: norms, eh_proj and LM heads


class Renaming(NamedTuple):
    """How mlx-lm's `sanitize` renames checkpoint tensors that it stacks, splits or dequantizes.

    A pattern and its replacements: a pattern with several, as for a split tensor, becomes each of these.
    """

    stored: str  # regex in a checkpoint's name
    becomes: tuple[str, ...]
    shown: str = ""  # `stored` as messages print it if a tensor of `becomes` is missing


NUMBERED_EXPERTS = Renaming(r"\.mlp\.experts\.\d+\.", (".mlp.switch_mlp.",), ".mlp.experts.*.")
GATE_UP = (".switch_mlp.gate_proj.weight", ".switch_mlp.up_proj.weight")
FUSED_EXPERTS = (
    Renaming(r"\.experts\.gate_up_proj$", GATE_UP, ".experts.gate_up_proj"),
    Renaming(r"\.experts\.down_proj$", (".switch_mlp.down_proj.weight",), ".experts.down_proj"),
)
MLA_KV_B = Renaming(r"\.kv_b_proj\.", (".embed_q.", ".unembed_out."), ".kv_b_proj.")
SCALED_FP8 = Renaming(r"\.weight_scale_inv$", (".weight",))


class Port(WithHeads, HasRuntime, nn.Module):
    """Mixin that makes mlx-lm's Model with `model.embed_tokens`, `model.layers` and `model.norm` a `target.Target`.

    `Target` documents the methods that the decode loop calls. A port sets SPEC and, if they differ from the defaults,
    the class attributes below.
    """

    SPEC: MTPSpec
    BASE: Any  # class whose `sanitize` is used: by default mlx-lm's Model
    IGNORED: tuple[str, ...] = ()  # prefixes and suffixes of tensors that text decoding does not use
    OWN: re.Pattern | None = None  # how the names of all other tensors begin; None: in any way
    PREFIX = ""  # of the target's tensors in a conversion
    IMPLIED: tuple[tuple[str, Any], ...] = ()  # keys of config.json and the only value that is implemented
    ZERO_CENTRED: tuple[str, str] | None = None  # regexes of names found only in hub / only in converted checkpoints
    RENAMED: tuple[Renaming, ...] = ()  # what `sanitize` does to names, for messages
    NO_KV_BITS: str | None = None  # why keys and values cannot be quantized
    MASK_ARRAY = False  # whether the layers need a mask as an array instead of "causal"
    INSIDE = "model.layers.0."  # prefix under which BASE.sanitize of a `one_layer()` expects a head's block
    OURS: tuple[type, ...] = ()  # classes that replace the mlx-lm module that is their last base
    MLP: tuple[type, ...] = ()  # mlx-lm's modules that compute down(swiglu(gate(x), up(x))), clamped at `limit`
    ROUTER: tuple[type, ...] = ()  # modules that choose from `x @ weight.T` and use x for nothing else
    ATTENTION: tuple[type, ...] = ()  # modules with q_proj, k_proj, v_proj and optional norms, RoPE and gate
    MOE: tuple[type, ...] = ()  # modules that sum the experts chosen by `gate` and an optional shared one
    BLOCK: tuple[type, ...] = ()  # layers that compute h = x + attention(norm(x)), then h + mlp(norm(h))
    NORM: tuple[type, ...] = (nn.RMSNorm,)  # modules that compute mx.fast.rms_norm of `weight` and `eps`

    args: Any
    model: Any
    layers: Any

    def __init_subclass__(cls) -> None:
        if not issubclass(base := cls.__bases__[-1], Port):
            cls.BASE = base

    def __init__(self, args: Any, heads: int = 0, spec: MTPSpec | None = None):
        """Create mlx-lm's model and `heads` MTP heads described by `spec` (None: the family's)."""
        super().__init__(args)  # type: ignore[call-arg]
        self.runtime = Runtime()
        if self.ATTENTION and not getattr(args, "head_dim", None):
            args.head_dim = args.hidden_size // args.num_attention_heads
        self.spec, sizes = spec or self.SPEC, (self.model.norm, self.args.vocab_size)
        tuned = self.spec.prefix == TUNED.prefix
        blocks = [self.like_last_layer() if tuned else self.head_block(depth) for depth in range(heads)]
        self.mtp = [MTPHead(self.spec, block, *sizes, mask_array=self.MASK_ARRAY) for block in blocks]
        ours = {kind.__bases__[-1]: kind for kind in self.OURS}
        for module in self.modules():
            module.__class__ = ours.get(type(module), type(module))
        if self.axes:
            add_axes(self, self.axes)

    @property
    def axes(self) -> tuple[int, ...]:
        """The number of RoPE frequencies that turn with each axis (t, y, x) of pictures; () for text's positions."""
        return ()

    def head_block(self, depth: int) -> nn.Module:
        """Create the decoder layer of an MTP head: by default one more layer of the target's kind."""
        return self.BLOCK[0](self.args, self.args.num_hidden_layers + depth)

    @property
    def vocab_size(self) -> int:
        return self.args.vocab_size

    @property
    def language(self) -> Any:
        """The module that contains the LM head."""
        return self

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [n, L, H] of tokens, which the first layer reads."""
        return self.model.embed_tokens(tokens)

    def hidden(self, tokens: mx.array, cache: Sequence[Any], rows: PromptRows = NO_ROWS) -> mx.array:
        """Append tokens [n, L] to the caches; return the residual stream before the final norm [n, L, H].

        With `taps` the streams after these layers are concatenated to it along H. rows: of a picture, see `Target`.
        """
        x = self.embedded(tokens) if rows.embeddings is None else rows.embeddings
        with on_axes(cache if rows.positions is not None else (), rows.positions):
            return self.captured(self.stream(x, cache))

    def stream(self, x: mx.array, cache: Sequence[Any]) -> list[mx.array]:
        """Append embeddings x to the caches; return the residual stream before the first layer and after each layer.

        x and the arrays of the stream: [n, L, H].
        """
        stream, masks = [x], {}
        for layer, c in zip(self.layers, cache, strict=True):
            kind = type(c), getattr(c, "ring", None)
            if kind not in masks:
                masks[kind] = c.make_mask(x.shape[1], return_array=self.MASK_ARRAY)
            stream.append(layer(stream[-1], mask=masks[kind], cache=c))
        return stream

    def captured(self, stream: list[mx.array]) -> mx.array:
        """Select the result of `hidden` from the residual stream before the first layer and after each layer."""
        return mx.concatenate([stream[-1], *(stream[i] for i in self.taps)], axis=-1) if self.taps else stream[-1]

    @property
    def width(self) -> int:
        return self.model.norm.weight.size

    @property
    def final_norm(self) -> Any:
        return self.model.norm

    @property
    def embedding(self) -> Any:
        return self.model.embed_tokens

    def unembedding(self, depth: int | None = None) -> Any:
        if depth is not None and "head" in self["mtp"][depth]:
            return self["mtp"][depth]["head"]
        language = self.language
        if "lm_head" in language:
            return language["lm_head"]
        return self.model.embed_tokens

    def normed(self, hidden: mx.array) -> mx.array:
        return self.model.norm(hidden[..., : self.width] if self.taps else hidden)

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.width), self.model.norm.weight.dtype)

    def windows(self) -> list[CacheKind]:
        """Return one window (None: all positions) or other cache kind per layer of `cached_layers`."""
        return [None] * len(self.layers)

    def renamed(self, name: str) -> list[str]:
        """Return the parameter paths that a checkpoint tensor becomes, or is a part of; a port may return none."""
        head = self.spec.locate(name, self.args.num_hidden_layers)
        names = [name if head is None else f"mtp.{head[0]}.{head[1]}"]
        if head is None and name.endswith("lm_head.weight") and getattr(self.args, "tie_word_embeddings", False):
            names = [name.replace("lm_head", "model.embed_tokens")]
        for rule in self.RENAMED:
            names = list(dict.fromkeys(re.sub(rule.stored, new, n) for n in names for new in rule.becomes))
        return names

    def unrenamed(self, path: str) -> str:
        """Return a parameter's path as messages show it: with the checkpoint's names of the renamed parts."""
        for rule in self.RENAMED:
            for new in rule.becomes if rule.shown else ():
                path = path.replace(new, rule.shown)
        return path

    def sanitized(self, trunk: Tensors, heads: Tensors, *, shift_trunk: bool, shift_heads: bool) -> Tensors:
        """Convert checkpoint tensors to parameters by path; KeyError if mlx-lm finds one missing.

        trunk, heads: the target's and the heads' tensors. shift_trunk, shift_heads: whether their norms are stored
        zero-centred and need 1 added. mlx-lm decides that for the trunk (here shift_trunk is unused). mlx-lm may
        judge the heads' norms differently, so with ZERO_CENTRED they bypass mlx-lm and are shifted here.
        """
        if self.spec.prefix == TUNED.prefix:
            return self.BASE.sanitize(self, trunk) | {
                name.replace(TUNED_PREFIX, "mtp."): heads[name] for name in heads
            }
        layers, centred = self.args.num_hidden_layers, self.ZERO_CENTRED is not None
        places = {name: self.spec.locate(name, layers) for name in heads}
        kept = {n: place for n, place in places.items() if centred and place and place[1].endswith("norm.weight")}
        parameters = self.sanitized_heads({name: w for name, w in heads.items() if name not in kept})
        for name, (depth, path) in kept.items():
            parameters[f"mtp.{depth}.{path}"] = heads[name] + 1 if shift_heads else heads[name]
        return self.BASE.sanitize(self, trunk) | parameters

    def one_layer(self) -> Any:
        """Return an object to pass as `self` to BASE.sanitize, for a model of one layer."""
        return SimpleNamespace(args=replace(self.args, num_hidden_layers=1))

    def sanitized_heads(self, heads: Tensors) -> Tensors:
        """Return parameters by path: each depth's tensors after mlx-lm's sanitizing (experts, fp8, MLA).

        KeyError names a missing tensor.
        """
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
            except KeyError as e:  # mlx-lm assumes that the tensors it stacks or splits exist
                raise KeyError(f"mtp.{depth}.block." + str(e.args[0]).partition(self.INSIDE)[2]) from None
            for name, w in block.items():
                inside = name.partition(self.INSIDE)[2]  # a wrapper's sanitizing adds its own prefix
                path = inside.removeprefix(OUTSIDE) if inside.startswith(OUTSIDE) else f"block.{inside}"
                parameters[f"mtp.{depth}.{path}"] = w
        return parameters


class HeadlessPort(Port):
    """A family whose checkpoints have no MTP heads. `heads` is ignored unless `spec` is of `tune-heads`' heads."""

    SPEC = MTPSpec(tensors=())  # matches no tensor

    def __init__(self, args: Any, heads: int = 0, spec: MTPSpec | None = None):
        super().__init__(args, heads if spec is not None and spec.prefix == TUNED.prefix else 0, spec)
