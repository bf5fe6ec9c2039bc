"""The demo network: mlx-lm's Step-3.5 trunk, chained MTP depths with own heads, and the losses of both."""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.step3p5 import ModelArgs, Step3p5DecoderLayer, Step3p5Model

from .activations import cross_entropy
from .layers import attention, decoder_layer, expert_weights

RESIDUAL_SCALE, HEAD_SCALE = 0.2, 0.1  # of the initial weights that write to the residual stream, to the logits
MTP_WEIGHT = 0.3  # of the depths' losses while the trunk is trained


class MTPDepth(nn.Module):
    """One MTP depth: an embedding and a hidden state fused, one decoder layer, an LM head of its own."""

    def __init__(self, args: ModelArgs, depth: int):
        super().__init__()
        self.enorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.hnorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.block = Step3p5DecoderLayer(args, args.num_hidden_layers + depth)
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.output = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, embedding: mx.array, hidden: mx.array) -> mx.array:
        """Block output [B, L, H] (what the next depth reads) from embedding and hidden, both [B, L, H]."""
        x = self.eh_proj(mx.concatenate([self.enorm(embedding), self.hnorm(hidden)], axis=-1))
        return decoder_layer(self.block, x)

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, L, V] for the token at p+2+k, from this depth's block output at slot p."""
        return self.output(self.norm(hidden))


class DemoModel(nn.Module):
    """Trunk, LM head and MTP depths; parameters under `model`, `lm_head` (as in mlx-lm) and `mtp`."""

    def __init__(self, args: ModelArgs, depths: int):
        super().__init__()
        self.args = args
        self.model = Step3p5Model(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        self.mtp = [MTPDepth(args, k) for k in range(depths)]
        for layer in self.decoder_layers():
            layer.window = args.sliding_window if layer.is_sliding else 0
            if layer.is_moe_layer:  # `balance_router` sets it
                layer.mlp.gate.freeze(keys=["router_bias"], recurse=False)

    def decoder_layers(self) -> list[Step3p5DecoderLayer]:
        """The trunk's layers and then the depths' blocks."""
        return [*self.model.layers, *(depth.block for depth in self.mtp)]

    def hidden(self, tokens: mx.array) -> mx.array:
        """Trunk output before the final norm [B, L, H] of tokens [B, L]; the sliding window divides L."""
        h = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            h = decoder_layer(layer, h)
        return h

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, L, V] for the next token, from the trunk's hidden."""
        return self.lm_head(self.model.norm(hidden))

    def all_logits(self, tokens: mx.array, mtp_rows: int | None = None) -> list[mx.array]:
        """Logits [B, L, V] of the trunk (for p+1) and depth k (for p+2+k) on tokens [B, L + depths + 1].

        The depths work on the first `mtp_rows` rows only, if that is given.
        """
        slots = tokens.shape[1] - len(self.mtp) - 1
        h = self.hidden(tokens[:, :slots])
        logits = [self.logits(h)]
        h, tokens = h[:mtp_rows], tokens[:mtp_rows]
        for k, depth in enumerate(self.mtp):
            h = depth(self.model.embed_tokens(tokens[:, 1 + k : 1 + k + slots]), h)
            logits.append(depth.logits(h))
        return logits


def build(args: ModelArgs, seed: int, depths: int) -> DemoModel:
    """Return a new model from `seed`: mlx.nn's initial values, scaled by the constants above."""
    mx.random.seed(seed)
    model = DemoModel(args, depths)
    outputs = []
    for layer in model.decoder_layers():
        mlps = [layer.mlp.switch_mlp, layer.mlp.share_expert] if layer.is_moe_layer else [layer.mlp]
        outputs += [layer.self_attn.o_proj, *(m.down_proj for m in mlps)]
    for output in outputs:
        output.weight = output.weight * RESIDUAL_SCALE
    for head in [model.lm_head, *(depth.output for depth in model.mtp)]:
        head.weight = head.weight * HEAD_SCALE
    mx.eval(model.parameters())
    return model


def joint_loss(model: DemoModel, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """(main + MTP_WEIGHT * depths' sum, mean losses [1 + depths] in nats); depths see half of the rows."""
    slots = tokens.shape[1] - len(model.mtp) - 1
    losses = []
    for i, logits in enumerate(model.all_logits(tokens, mtp_rows=(len(tokens) + 1) // 2)):
        targets = tokens[: len(logits), 1 + i : 1 + i + slots].reshape(-1)
        losses.append(cross_entropy(logits.reshape(-1, logits.shape[-1]), targets).mean())
    losses = mx.stack(losses)
    return losses[0] + MTP_WEIGHT * losses[1:].sum(), losses


def foresight_loss(model: DemoModel, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """(main + depths' sum, mean losses [1 + depths] in nats); the depths' targets are the trunk's own choices."""
    slots = tokens.shape[1] - len(model.mtp) - 1
    trunk, *depths = model.all_logits(tokens)
    choice = mx.stop_gradient(trunk.argmax(axis=-1))
    losses = [cross_entropy(trunk.reshape(-1, trunk.shape[-1]), tokens[:, 1 : 1 + slots].reshape(-1)).mean()]
    for k, logits in enumerate(depths):
        logits = logits[:, : slots - 1 - k]  # the slots whose choice for p+2+k lies within the row
        losses.append(cross_entropy(logits.reshape(-1, logits.shape[-1]), choice[:, 1 + k :].reshape(-1)).mean())
    losses = mx.stack(losses)
    return losses.sum(), losses


def router_choices(model: DemoModel, tokens: mx.array) -> Iterator[tuple[nn.Module, mx.array]]:
    """(gate, weight of every expert [B * L, E]) of each MoE layer, for tokens [B, L]."""
    h = model.model.embed_tokens(tokens)
    for layer in model.model.layers:
        if layer.is_moe_layer:
            y = layer.post_attention_layernorm(h + attention(layer.self_attn, layer.input_layernorm(h), layer.window))
            yield layer.mlp.gate, expert_weights(layer.mlp, y.reshape(-1, y.shape[-1]))
        h = decoder_layer(layer, h)


def balance_router(model: DemoModel, tokens: mx.array, rate: float) -> None:
    """Move each router bias by `rate` towards equal use of the experts on tokens [B, L]."""
    for gate, weights in router_choices(model, tokens):
        load = (weights > 0).astype(mx.float32).mean(axis=0)
        gate.router_bias = gate.router_bias + rate * mx.sign(load.mean() - load)
    mx.eval(model.parameters())
