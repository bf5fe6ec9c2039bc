"""Compare the Step-3.5 port with Hugging Face transformers on one checkpoint directory, PyTorch in float32.

Differences in transformers 5.23, and how these tests handle them:
- It has the text model only inside the Step-3.7 wrapper: a random vision tower is created and not used.
- It loses the MTP blocks' number of sliding heads unless `mtp_per_layer_config` states it.
- Its name map lacks the norm under `transformer.shared_head`, and it never reads the heads' own LM heads.
- It chains the heads after their norm and starts from the target's norm: here blocks are called separately.
- The MTP blocks, numbered from 0, use `swiglu_limits_shared` of the trunk's first layers: they are 0 here.
"""

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
loading = pytest.importorskip("transformers.core_model_loading")

# Limits low enough to clamp, and RoPE scaling that changes frequencies that matter at these sizes.
CONFIG = {
    **tiny.CONFIG,
    "rope_scaling": {**tiny.CONFIG["rope_scaling"], "original_max_position_embeddings": 64},
    "swiglu_limits": [0, 0, 0, 0.3],
    "swiglu_limits_shared": [0, 0, 0, 0.2],
}
LAYERS, DEPTHS = CONFIG["num_hidden_layers"], CONFIG["num_nextn_predict_layers"]
SEEDS = [0, 1, 2]


class TorchStep:
    """transformers' model of a checkpoint: rows before the final norm, and heads wired as in Step-3.5."""

    def __init__(self, path, config: dict, weights: dict[str, mx.array]):
        vision = {"width": 8, "layers": 1, "heads": 2, "image_size": 28}
        wrapper = transformers.Step3p7Config(text_config=dict(config), vision_config=vision)
        other = {"num_attention_heads": config["attention_other_setting"]["num_attention_heads"]}
        wrapper.text_config.mtp_per_layer_config = dict.fromkeys(range(DEPTHS), other)
        load = transformers.Step3p7ForConditionalGeneration.from_pretrained
        self.model, info = load(path, config=wrapper, dtype=torch.float32, output_loading_info=True)
        unread = [*info["unexpected_keys"], *info["mismatched_keys"], *info["missing_keys"]]
        assert not [name for name in unread if "vision_model" not in name and "multi_modal" not in name]
        infix = loading.WeightRenaming(r"\.mtp_block\.transformer\.post_norm\.", ".post_norm.")
        self.model._weight_conversions.append(infix)
        self.mtp = modeling_layers.MtpModel.from_pretrained(self.model)  # raises if a weight is missing
        for layer in self.mtp.layers:
            layer.use_post_norm = False
        names = [f"model.layers.{LAYERS + k}.transformer.shared_head.output.weight" for k in range(DEPTHS)]
        self.heads = [torch.from_numpy(np.array(weights[name])) for name in names]
        self.trunk = self.model.model.language_model

    @torch.no_grad()
    def hidden(self, tokens: list[int]):
        """Rows [1, T, H] before the final norm."""
        rows = []
        hook = self.trunk.norm.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0]))
        self.trunk(torch.tensor([tokens]), use_cache=False)
        hook.remove()
        return rows[0]

    @torch.no_grad()
    def logits(self, tokens: list[int]):
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    @torch.no_grad()
    def block(self, depth: int, hidden, tokens: list[int]):
        """Return a depth's output [1, n, H] for rows [1, n, H] whose first slot reads tokens[1 + depth]."""
        first, n = 1 + depth, hidden.shape[1]
        following, positions = torch.tensor([tokens[first : first + n]]), torch.arange(first, first + n)[None]
        return self.mtp.forward_layer(depth, hidden, positions, None, input_ids=following)

    @torch.no_grad()
    def draft_logits(self, depth: int, output):
        return self.mtp.layers[depth].post_norm(output) @ self.heads[depth].T


@pytest.fixture(scope="module", params=SEEDS)
def pair(request, tmp_path_factory):
    """Return (our model, transformers' model) of one checkpoint directory."""
    weights = tiny.random_weights(CONFIG, seed=request.param)
    path = tiny.save(tmp_path_factory.mktemp("parity"), CONFIG, weights)
    return mlx_mtp.load_model(path), TorchStep(path, CONFIG, weights)


def a_text(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, CONFIG["vocab_size"], length).tolist()


def assert_close(ours: mx.array, theirs, tolerance: float = 1e-4):
    ours, theirs = np.array(ours), theirs.numpy()
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < tolerance


def our_hidden(model, cache, chunks: list[list[int]]) -> mx.array:
    return mx.concatenate([model.hidden(mx.array(chunk)[None], cache.layers) for chunk in chunks], axis=1)


# The window is 8.
@pytest.mark.parametrize("cuts", [[], [5], [8, 9, 30]])
def test_trunk_logits(pair, cuts):
    model, theirs = pair
    tokens = a_text(40)
    chunks = [tokens[lo:hi] for lo, hi in zip([0, *cuts], [*cuts, 40], strict=True)]
    hidden = our_hidden(model, mlx_mtp.make_prompt_cache(model), chunks)
    assert_close(hidden, theirs.hidden(tokens))
    assert_close(model.logits(hidden)[0], theirs.logits(tokens))


@pytest.mark.parametrize("cut", [0, 13])
def test_every_depth(pair, cut):
    """Each side chains its own rows: all depths read a sequence of five windows, whole or in two chunks."""
    model, theirs = pair
    tokens = a_text(40)
    cache = mlx_mtp.make_prompt_cache(model)
    ours = model.capture(our_hidden(model, cache, [tokens[:-1]]))
    expected = theirs.hidden(tokens[:-1])
    for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=True)):
        n = ours.shape[1] - (depth > 0)  # the last slot of the previous depth has no next token here
        following = mx.array(tokens[1 + depth : 1 + depth + n])[None]
        kv.seek(depth, depth)
        spans = [slice(lo, hi) for lo, hi in ((0, cut), (cut, n)) if hi > lo]
        outputs = [head(model.embed(following[:, s], depth), ours[:, s], kv) for s in spans]
        output, expected = mx.concatenate(outputs, axis=1), theirs.block(depth, expected[:, :n], tokens)
        assert_close(output, expected)
        assert_close(model.draft_logits(depth, output), theirs.draft_logits(depth, expected))
        ours = head.feedback(output, ours[:, :n])
    assert depth + 1 == DEPTHS


def test_a_gguf_file(tmp_path):
    """Written as llama.cpp's converters do from the checkpoint's tensors, and without a scaling of RoPE."""
    config = {**CONFIG, "vocab_size": 13, "rope_scaling": None, "max_position_embeddings": 4096}
    weights = tiny.random_weights(config)
    theirs = TorchStep(tiny.save(tmp_path / "hub", config, weights), config, weights)
    transcode(prepare(written("step3p5", tmp_path / "x.gguf", config, weights)), tmp_path / "new")
    model, tokens = mlx_mtp.load_model(tmp_path / "new"), a_text(40)
    hidden = our_hidden(model, mlx_mtp.make_prompt_cache(model), [tokens])
    assert_close(model.logits(hidden)[0], theirs.logits(tokens))


@pytest.mark.parametrize("length", [3, 20])
def test_greedy_text(pair, length):
    """Drafting with all depths gives the tokens that transformers computes without a cache."""
    model, theirs = pair
    prompt, stats = a_text(length), mlx_mtp.Stats()
    text = list(prompt)
    for _ in range(30):
        text.append(theirs.logits(text)[-1].argmax().item())
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=30, num_draft_tokens=DEPTHS, adaptive=False, stats=stats)
    assert [token for token, _, _ in steps] == text[length:]
    assert len(stats.drafted) == DEPTHS
    assert min(stats.drafted) > 0
