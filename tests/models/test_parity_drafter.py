"""Compare an EAGLE-3 head with PyTorch: transformers' Llama layer with widened projections, as in its training.

transformers has no EAGLE-3, and speculators, which does, needs an older transformers; so the wiring is written here.
"""

import drafters
import families
import mlx.core as mx
import numpy as np
import pytest

import mlx_mtp

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")

TOLERANCE = 1e-4
V, H = families.V, families.H
TARGET = {**drafters.GQA, "model_type": "llama", "num_hidden_layers": 6, "architectures": ["LlamaForCausalLM"]}


class TorchDrafter:
    """fc over three hidden states, one widened Llama layer, norm, reduced LM head."""

    def __init__(self, weights: dict):
        config = transformers.LlamaConfig(**drafters.CONFIG, attn_implementation="eager")
        self.layer, self.rotary = llama.LlamaDecoderLayer(config, 0), llama.LlamaRotaryEmbedding(config)
        attention, size = self.layer.self_attn, config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, torch.nn.Linear(2 * size, getattr(attention, name).out_features, bias=False))
        self.hidden_norm, self.norm = (llama.LlamaRMSNorm(size, eps=config.rms_norm_eps) for _ in range(2))
        state = {n: torch.tensor(np.array(w)) for n, w in weights.items()}
        inside = {n.removeprefix("midlayer."): w for n, w in state.items() if n.startswith("midlayer.")}
        self.hidden_norm.load_state_dict({"weight": inside.pop("hidden_norm.weight")})
        self.layer.load_state_dict(inside)
        self.norm.load_state_dict({"weight": state["norm.weight"]})
        self.fc, self.lm_head, self.d2t = state["fc.weight"], state["lm_head.weight"], state["d2t"]

    @torch.no_grad()
    def __call__(self, embeddings, hidden):
        """Return (output rows [1, n, H], logits [n, Vd])."""
        n, layer = hidden.shape[1], self.layer
        positions = self.rotary(hidden, torch.arange(n)[None])
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        both = torch.cat([layer.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        x = hidden + layer.self_attn(both, position_embeddings=positions, attention_mask=mask)[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, (self.norm(x) @ self.lm_head.T)[0]


def close(ours, theirs):
    np.testing.assert_allclose(np.array(ours), theirs.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [2, 25])
def test_target_rows_and_every_draft(tmp_path, length):
    directory, _ = families.headless(tmp_path / "target", TARGET)
    weights = drafters.weights(drafters.CONFIG, H)
    drafter = drafters.save(tmp_path / "drafter", drafters.CONFIG, H)
    model = mlx_mtp.load_model(directory, draft_model=drafter)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    reference = TorchDrafter(weights)
    tokens = np.random.default_rng(length).integers(0, V, length).tolist()
    cache = mlx_mtp.make_prompt_cache(model)
    rows = model.hidden(mx.array(tokens)[None], cache.layers)
    with torch.no_grad():
        out = theirs(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    close(model.logits(rows)[0], out.logits[0])
    # After 2, N/2 and N-3 layers; hidden_states[i] is the stream after i layers.
    captured = torch.cat([out.hidden_states[i] for i in (2, 3, 3)], dim=-1)
    close(rows[..., H:], captured)
    hidden = captured[:, :-1] @ reference.fc.T
    following, ours = tokens[1:], model.capture(rows[:, :-1])
    close(ours, hidden)
    fed, head = model.embed(mx.array(following)[None], 0), model.mtp[0]
    for _ in range(3):
        output = head(fed, ours, cache.heads[0])
        embeddings = theirs.model.embed_tokens(torch.tensor([following])).detach()
        expected, logits = reference(embeddings, hidden)
        close(model.draft_logits(0, output)[0, -1], logits[-1])
        row = logits[-1].argmax()
        token = int(row + reference.d2t[row])
        assert head.token(mx.argmax(model.draft_logits(0, output[:, -1:]))).item() == token
        following, hidden = [*following, token], torch.cat([hidden, expected[:, -1:]], dim=1)
        ours, fed = head.feedback(output, ours)[:, -1:], model.embed(mx.array([[token]]), 0)
