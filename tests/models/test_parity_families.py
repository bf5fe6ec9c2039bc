"""Compare ports with Hugging Face transformers on one checkpoint: PyTorch in float32, trunk and every draft.

transformers' generic MTP (`MtpModel`) shares the target's LM head and embedding, so these checkpoints have no own
ones. It lacks MiMo-7B; Qwen2 with renamed tensors replaces it.
"""

import copy
import importlib
import json

import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from gguf_samples import written

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
masking = pytest.importorskip("transformers.masking_utils")

TOLERANCE = 1e-4


def nextn_checkpoint(name: str, path, **changes) -> None:
    """Save the family's checkpoint without the head's copies of embedding and LM head."""
    _, weights, _ = families.build(name, path, **changes)
    shared = {
        n: w for n, w in weights.items() if not n.endswith(("shared_head.head.weight", "0.embed_tokens.weight"))
    }
    layers = families.FAMILIES[name].config["num_hidden_layers"]
    shared.pop(f"model.layers.{layers}.embed_tokens.weight", None)
    tiny.save(path, json.loads((path / "config.json").read_text()), shared)


class TorchFamily:
    """transformers' model of a checkpoint, and its generic MTP."""

    def __init__(self, path, *, depths: int = 1, kind: str = "full_attention", mlp: str = "sparse"):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = self.model.config
        config.num_mtp_layers = depths
        config.mtp_layer_types, config.mtp_mlp_layer_types = [kind] * depths, [mlp] * depths
        # It finds heads only by the number of layers of the released checkpoints.
        heads = range(config.num_hidden_layers, config.num_hidden_layers + depths)
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}\." for i in heads]
        self.mtp = modeling_layers.MtpModel.from_pretrained(self.model)

    @torch.no_grad()
    def trunk(self, tokens: list[int]):
        """Return (rows after the final norm [1, T, H], logits [T, V])."""
        out = self.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        return out.hidden_states[-1], out.logits[0]

    @torch.no_grad()
    def head(self, hidden, following: list[int], depth: int = 0):
        """Return (rows to feed back [1, n, H], logits [n, V]) for rows [1, n, H] and the token after each."""
        positions = torch.arange(1, len(following) + 1)[None]
        rows = self.mtp.forward_layer(depth, hidden, positions, None, input_ids=torch.tensor([following]))
        return rows, self.model.lm_head(rows)[0]


class TorchSparse(TorchFamily):
    """For layers with indexers: transformers' MTP builds no mask for them and keeps GLM's extra outputs."""

    def __init__(self, path):
        super().__init__(path, kind="indexed_attention")
        self.mtp.create_masks_for_mtp_layer = self.masks
        for layer in self.mtp.layers:
            layer.mtp_block.register_forward_hook(lambda block, read, out: out[0] if type(out) is tuple else out)

    def masks(self, depth, embeddings, cache, positions) -> dict:
        mask = masking.create_causal_mask(
            self.mtp.config, embeddings, None, cache, position_ids=positions, allow_is_causal_skip=False
        )
        return {"attention_mask": mask}


def through_gguf(name: str, path, weights: dict[str, mx.array], **changes):
    """Return the model of a GGUF file of a family's checkpoint, written as llama.cpp's converters do."""
    config = {**families.FAMILIES[name].config, **changes}
    transcode(prepare(written(name, path / "x.gguf", config, weights)), path / "transcoded")
    return mlx_mtp.load_model(path / "transcoded")


def assert_close(ours: mx.array, theirs):
    ours, theirs = np.array(ours), theirs.numpy()
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < TOLERANCE


def rows_in_chunks(model, cache, tokens: list[int], cuts: list[int]) -> mx.array:
    """Return the target's rows [1, T, H] from a prefill in chunks that end at the cuts."""
    bounds = zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    return mx.concatenate([model.hidden(mx.array(tokens[a:b])[None], cache.layers) for a, b in bounds], axis=1)


def assert_recycled_drafts(model, theirs, cuts: list[int]) -> None:
    """Compare a trunk prefilled in chunks, the head on committed rows, and three drafts from its own output."""
    tokens = np.random.default_rng(0).integers(0, families.V, 24).tolist()
    cache = mlx_mtp.make_prompt_cache(model)
    rows = rows_in_chunks(model, cache, tokens, cuts)
    expected, logits = theirs.trunk(tokens)
    assert_close(model.capture(rows), expected)
    assert_close(model.logits(rows)[0], logits)
    (head,), (kv,) = model.mtp, cache.heads
    hidden, following = model.capture(rows), [*tokens[1:], 3]
    torch_hidden, torch_following = expected, list(following)
    for _ in range(4):
        output = head(model.embed(mx.array(following)[None], 0), hidden, kv)
        fed_back, logits = theirs.head(torch_hidden, torch_following)
        assert_close(model.draft_logits(0, output)[0, -1], logits[-1])
        hidden, following = head.feedback(output, hidden)[:, -1:], [int(logits[-1].argmax())]
        assert_close(hidden[0, 0], fed_back[0, -1])
        torch_hidden = torch.cat([torch_hidden, fed_back[:, -1:]], dim=1)
        torch_following += following


@pytest.mark.parametrize("cuts", [[], [5], [8, 9, 17]])
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_untied", "deepseek_v3", "glm4_moe_lite"])
def test_nextn_families(tmp_path, name, cuts):
    """Chunks of one, a few and many rows: latent attention is absorbed for up to eight."""
    nextn_checkpoint(name, tmp_path)
    model, theirs = mlx_mtp.load_model(tmp_path), TorchFamily(tmp_path)
    assert_recycled_drafts(model, theirs, cuts)


@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm_moe_dsa_shared"])
def test_heads_of_gguf_files(tmp_path, name):
    """Written as llama.cpp's converters do; their heads compute the drafts of transformers' model."""
    changes = {"index_n_heads": 16} if "dsa" in name else {}
    nextn_checkpoint(name, tmp_path, **changes)
    model = through_gguf(name, tmp_path, mx.load(str(tmp_path / "model.safetensors")), **changes)
    assert_recycled_drafts(model, (TorchSparse if "dsa" in name else TorchFamily)(tmp_path), cuts=[5])


@pytest.mark.parametrize("cuts", [[], [5], [8, 9, 17]])
@pytest.mark.parametrize("topk", [64, 5])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_shared"])
def test_sparse_families(tmp_path, name, topk, cuts):
    """24 positions, of which a row attends to all or to five.

    With few indexer heads many scores are exactly zero, and transformers does not define the order of ties.
    """
    nextn_checkpoint(name, tmp_path, index_topk=topk, index_n_heads=16)
    assert_recycled_drafts(mlx_mtp.load_model(tmp_path), TorchSparse(tmp_path), cuts)


def with_nextn_names(weights: dict[str, mx.array], prefix: str, names: dict[str, str], layers: int) -> dict:
    """Return the checkpoint with heads `prefix`0, 1, .. renamed to layers after the last one."""
    renamed = {}
    for name, w in weights.items():
        if name.startswith(prefix):
            depth, _, own = name[len(prefix) :].partition(".")
            module, _, rest = own.partition(".")
            name = f"model.layers.{layers + int(depth)}.{names.get(module, module)}.{rest}"
        renamed[name] = w
    return renamed


def test_mimo(tmp_path):
    """transformers reads rows after the final norm, so our spec is set to that; MiMo's order is [hidden,
    embedding].
    """
    path, weights, _ = families.build("mimo", tmp_path / "mimo")
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj"}
    names["final_layernorm"] = "shared_head.norm"
    stand_in = {**families.MIMO, "model_type": "qwen2", "mtp_hidden_states_first": True}
    tiny.save(tmp_path / "qwen2", stand_in, with_nextn_names(weights, "model.mtp_layers.", names, 3))
    model = mlx_mtp.load_model(path, mtp_overrides={"capture": "post"})
    assert_recycled_drafts(model, TorchFamily(tmp_path / "qwen2"), cuts=[5])


@pytest.mark.parametrize("cuts", [[], [5], [8, 9, 17]])
def test_mimo_v2_flash(tmp_path, cuts):
    """The window counts the query's own position here and in mlx-lm, but not in transformers.

    A whole prefill is of a GGUF file. Every depth reads the target's rows; transformers would chain them, so each is
    called separately.
    """
    path, weights, _ = families.build("mimo_v2_flash", tmp_path / "ours")
    kinds = [
        "sliding_attention" if sliding else "full_attention" for sliding in families.MIMO_V2["hybrid_layer_pattern"]
    ]
    config = {**families.MIMO_V2, "sliding_window_size": 7, "layer_types": kinds}
    names = {"final_layernorm": "shared_head.norm", "pre_mlp_layernorm": "post_attention_layernorm"}
    tiny.save(tmp_path / "torch", config, with_nextn_names(weights, "model.mtp.layers.", names, 4))
    model = mlx_mtp.load_model(path) if cuts else through_gguf("mimo_v2_flash", tmp_path, weights)
    theirs = TorchFamily(tmp_path / "torch", depths=3, kind="sliding_attention", mlp="dense")
    tokens = np.random.default_rng(0).integers(0, families.V, 30).tolist()
    cache = mlx_mtp.make_prompt_cache(model)
    rows = rows_in_chunks(model, cache, tokens, cuts)
    expected, logits = theirs.trunk(tokens)
    assert_close(model.capture(rows), expected)
    assert_close(model.logits(rows)[0], logits)
    for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=True)):
        slots = len(tokens) - 1 - depth
        kv.seek(depth, depth)
        output = head(model.embed(mx.array(tokens[1 + depth :])[None], depth), model.capture(rows)[:, :slots], kv)
        _, logits = theirs.head(expected[:, :slots], tokens[1 + depth :], depth)
        assert_close(model.draft_logits(depth, output)[0], logits)


@pytest.mark.parametrize("cuts", [[], [5], [8, 9, 17]])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_qwen(tmp_path, name, cuts):
    """transformers reads the text model's layout: no `language_model`, the head as a layer after the last one.

    A whole prefill is of a GGUF file. With seed 0 a recurrent row is so near zero that its norm magnifies rounding,
    in mlx-lm's model as in ours.
    """
    path, weights, _ = families.build(name, tmp_path / "ours", seed=1)
    config = families.FAMILIES[name].config
    text = config.get("text_config", config)
    names = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }
    renamed = {}
    for tensor, w in weights.items():
        own = tensor.removeprefix("mtp.").removeprefix("layers.0.")
        module, _, rest = own.partition(".")
        own = own if tensor.startswith("mtp.layers") else f"{names.get(module)}.{rest}"
        head = f"model.layers.{text['num_hidden_layers']}.{own}"
        renamed[head if tensor.startswith("mtp.") else tensor.replace("language_model.", "")] = w
    tiny.save(tmp_path / "torch", text, renamed)
    theirs = TorchFamily(tmp_path / "torch", mlp="sparse" if "num_experts" in text else "dense")
    model = mlx_mtp.load_model(path) if cuts else through_gguf(name, tmp_path, weights)
    assert_recycled_drafts(model, theirs, cuts)


class TorchNemotron:
    """transformers' trunk, and a head assembled from its blocks.

    Its generic MTP has one layer of the trunk's kind per depth, but this head has two. Projection, blocks and norm
    are
    connected here as in vLLM's port.
    """

    def __init__(self, path, weights: dict[str, mx.array]):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.port = importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h")
        config = copy.deepcopy(self.model.config)
        config._attn_implementation, config.layers_block_type = "eager", ["full_attention", "moe"]
        config.n_routed_experts = getattr(config, "mtp_n_routed_experts", None) or config.n_routed_experts
        layers: list[dict] = [{}, {}]
        for name, w in weights.items():
            if name.startswith("mtp.layers."):
                layers[int(name[11])][name[13:]] = torch.from_numpy(np.array(w))
        self.enorm, self.hnorm = (self.norm_of(layers[0].pop(f"{n}.weight")) for n in ("enorm", "hnorm"))
        self.norm, self.eh_proj = (
            self.norm_of(layers[1].pop("final_layernorm.weight")),
            layers[0].pop("eh_proj.weight"),
        )
        for proj in ("up_proj", "down_proj"):
            numbered = [layers[1].pop(f"mixer.experts.{e}.{proj}.weight") for e in range(config.n_routed_experts)]
            layers[1][f"mixer.experts.{proj}"] = torch.stack(numbered)
        self.blocks = [self.port.NemotronHBlock(config, i) for i in range(2)]
        for block, own in zip(self.blocks, layers, strict=True):
            block.load_state_dict(own)

    def norm_of(self, weight):
        norm = self.port.NemotronHRMSNorm(weight.numel(), eps=self.model.config.layer_norm_epsilon)
        norm.load_state_dict({"weight": weight})
        return norm

    @torch.no_grad()
    def trunk(self, tokens: list[int]):
        rows = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return rows, self.model.lm_head(rows)[0]

    @torch.no_grad()
    def blockwise(self, hidden, following: list[int]):
        """Return rows [1, n, H] after the projection, after each block, and after the norm."""
        embedded = self.model.model.embeddings(torch.tensor([following]))
        x = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1) @ self.eh_proj.T
        mask = torch.full((len(following), len(following)), -torch.inf).triu(1)[None, None]
        attended = self.blocks[0](x, attention_mask=mask)
        mixed = self.blocks[1](attended)
        return x, attended, mixed, self.norm(mixed)

    def head(self, hidden, following: list[int]):
        rows = self.blockwise(hidden, following)[-1]
        return rows, self.model.lm_head(rows)[0].detach()


@pytest.mark.parametrize("cuts", [[], [5], [8, 9, 17], [18]])
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_latent"])
def test_nemotron_h(tmp_path, name, cuts):
    """Chunks of up to 16 rows are stepped row by row; longer ones, here of a GGUF file, use the chunked form."""
    path, weights, _ = families.build(name, tmp_path)
    model, theirs = mlx_mtp.load_model(path), TorchNemotron(path, weights)
    if not cuts:
        model = through_gguf(name, tmp_path, weights)
    assert_recycled_drafts(model, theirs, cuts)
    tokens = np.random.default_rng(1).integers(0, families.V, 20).tolist()
    hidden, _ = theirs.trunk(tokens)
    (head,), following = model.mtp, [*tokens[1:], 3]
    e, h = head.enorm(model.embed(mx.array(following)[None])), head.hnorm(mx.array(hidden.numpy()))
    ours = [head.eh_proj(mx.concatenate([e, h], axis=-1))]
    for layer in head.block.layers:
        ours.append(layer(ours[-1], "causal"))
    ours.append(head.norm(ours[-1]))
    for mine, other in zip(ours, theirs.blockwise(hidden, following), strict=True):
        assert_close(mine, other)
