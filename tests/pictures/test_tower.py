"""The tower and merger compute what a plain reference computes, in any order of axes, quantized or not."""

import json
import math

import mlx.core as mx
import numpy as np
import published
import pytest
import seeing

from mlx_mtp.checkpoint.parameters import named
from mlx_mtp.models.vision import attention, find_tower, qwen, qwen_pixels
from mlx_mtp.models.vision.attention import attend

pytest.importorskip("PIL", reason="needs Pillow: the extra vision, or test")
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CONFIG = seeing.config_of(moe=False)
RNG = np.random.default_rng(0)
SIZES = [(1, 1), (8, 8), (24, 40), (9, 200), (37, 8)]  # of pictures, in pixels


def tower_weights():
    return {name.removeprefix("model.visual."): np.array(w) for name, w in seeing.tower_weights().items()}


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def normed(x, weights, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def reference(weights, patches, height, width):
    """The tower in float64, patch by patch where that is simple. height, width: in patches."""
    places = [
        (2 * y + dy, 2 * x + dx)
        for y in range(height // 2) for x in range(width // 2) for dy in range(2) for dx in range(2)
    ]  # fmt: skip
    table = weights["pos_embed.weight"].reshape(5, 5, -1)
    learned = [interpolated(table, 4 * y / max(height - 1, 1), 4 * x / max(width - 1, 1)) for y, x in places]
    kernel = weights["patch_embed.proj.weight"].reshape(24, -1)
    x = patches.astype(float) @ kernel.T + weights["patch_embed.proj.bias"] + np.array(learned)
    angles = np.array([[place / 1e4 ** (i / 3) for place in pair for i in range(3)] for pair in places])
    turn = np.exp(1j * angles)  # 6 pairs of a head's 12 columns: 3 by the line, 3 by the column
    for i in range(2):
        qkv = linear(normed(x, weights, f"blocks.{i}.norm1"), weights, f"blocks.{i}.attn.qkv").reshape(-1, 3, 2, 12)
        heads = []
        for head in range(2):
            q, k, v = (qkv[:, part, head] for part in range(3))
            q, k = ((part[:, :6] + 1j * part[:, 6:]) * turn for part in (q, k))
            scores = np.exp((q @ k.conj().T).real / math.sqrt(12))
            heads.append(scores / scores.sum(-1, keepdims=True) @ v)
        x = x + linear(np.concatenate(heads, axis=-1), weights, f"blocks.{i}.attn.proj")
        inner = linear(normed(x, weights, f"blocks.{i}.norm2"), weights, f"blocks.{i}.mlp.linear_fc1")
        inner = inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))) / 2
        x = x + linear(inner, weights, f"blocks.{i}.mlp.linear_fc2")
    x = linear(normed(x, weights, "merger.norm").reshape(-1, 96), weights, "merger.linear_fc1")
    x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    return linear(x, weights, "merger.linear_fc2")


def interpolated(table, y, x):
    (low_y, low_x), last = (int(y), int(x)), len(table) - 1
    high_y, high_x = min(low_y + 1, last), min(low_x + 1, last)
    above = table[low_y, low_x] * (1 - (x - low_x)) + table[low_y, high_x] * (x - low_x)
    below = table[high_y, low_x] * (1 - (x - low_x)) + table[high_y, high_x] * (x - low_x)
    return above * (1 - (y - low_y)) + below * (y - low_y)


def tower(weights):
    found = qwen.Tower(CONFIG)
    found.load_weights(list(found.sanitized({name: mx.array(w) for name, w in weights.items()}).items()))
    return found


def features(module, patches, grid):
    for rows in module.stages(mx.array(patches), grid):  # noqa: B007 - the last
        pass
    return np.array(rows)


@pytest.mark.parametrize("pairs", [1 << 21, 40])
def test_the_tower_is_the_reference(pairs, monkeypatch):
    """Also with attention in pieces of few queries."""
    monkeypatch.setattr(attention, "CPU_PAIRS", pairs)
    monkeypatch.setattr(attention, "GPU_PAIRS", pairs)
    weights, pixels = tower_weights(), qwen.Pixels(seeing.PREPROCESSOR, CONFIG)
    module = tower(weights)
    for height, width in SIZES:
        picture = RNG.integers(0, 256, (height, width, 3), np.uint8)
        grid = pixels.grid(height, width)
        patches = pixels.patches(picture, grid)
        expected = reference(weights, patches, 2 * grid[1], 2 * grid[2])
        assert expected.shape == (grid[1] * grid[2], 32)
        assert np.abs(features(module, patches, grid) - expected).max() < 2e-6 * np.abs(expected).max()


def test_the_order_of_the_convolution_s_axes_is_found():
    weights, pixels = tower_weights(), qwen.Pixels(seeing.PREPROCESSOR, CONFIG)
    grid = (1, 2, 3)
    patches = pixels.patches(RNG.integers(0, 256, (16, 24, 3), np.uint8), grid)
    before = features(tower(weights), patches, grid)
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].transpose(0, 2, 3, 4, 1)
    assert np.array_equal(features(tower(weights), patches, grid), before)


def test_every_stage_can_be_evaluated_and_the_last_is_the_features(monkeypatch):
    monkeypatch.setattr(qwen, "STAGE", 1)
    module, patches = tower(tower_weights()), RNG.random((24, 96), np.float32)
    stages = [np.array(x) for x in module.stages(mx.array(patches), (1, 2, 3))]
    assert [x.shape for x in stages] == [(24, 24), (24, 24), (6, 32)]
    monkeypatch.undo()
    assert np.array_equal(features(module, patches, (1, 2, 3)), stages[-1])


def test_patches_are_embedded_in_pieces(monkeypatch):
    """Each is a stage, so that no stage copies all patches of a large picture; the features stay the same."""
    module, patches = tower(tower_weights()), RNG.random((24, 96), np.float32)
    expected = features(module, patches, (1, 2, 3))
    monkeypatch.setattr(qwen, "PIECE", 10)
    stages = [np.array(x) for x in module.stages(patches, (1, 2, 3))]
    assert [x.shape for x in stages[:3]] == [(10, 24), (10, 24), (4, 24)]
    assert np.abs(stages[-1] - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("size", [8, 64, 72, 80, 100, 130])
def test_attention_in_pieces_of_padded_heads(size, monkeypatch):
    """Padded to the next head size of MLX's fused attention; a size above all of them is unchanged."""
    padded, stock = set(), mx.fast.scaled_dot_product_attention

    def fused(q, k, v, **more):
        padded.add((q.shape[-1], k.shape[-1], v.shape[-1]))
        return stock(q, k, v, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    q, k, v = (mx.random.normal((1, 2, 50, size)) for _ in range(3))
    scores = mx.softmax((q @ k.swapaxes(-1, -2)) * size**-0.5, axis=-1)
    for pairs in (1 << 21, 350, 1):
        monkeypatch.setattr(attention, "CPU_PAIRS", pairs)
        assert mx.abs(attend(q, k, v) - scores @ v).max() < 1e-5
    assert padded == {({8: 64, 72: 80, 100: 128}.get(size, size),) * 3}


@pytest.mark.parametrize(("most", "band"), [(None, 1 << 20), (800, 1 << 20), (64, 1 << 20), (None, 1), (None, 2000)])
def test_pixels_are_those_of_transformers_processor(most, band, monkeypatch):
    """Bit for bit, at every size, with the processor's own limits and a smaller one, whole and in bands."""
    monkeypatch.setattr(qwen_pixels, "BAND", band)
    pixels = qwen.Pixels(seeing.PREPROCESSOR, CONFIG)
    size = {"shortest_edge": 64, "longest_edge": most or 16384}
    processor = Qwen2VLImageProcessorPil(**{**seeing.PREPROCESSOR, "size": size})
    for height, width in [*SIZES, (3, 3), (200, 1), (400, 300), (130, 128)]:
        picture = RNG.integers(0, 256, (height, width, 3), np.uint8)
        expected = processor(images=Image.fromarray(picture), return_tensors="np")
        grid = pixels.grid(height, width, most)
        assert [1, 2 * grid[1], 2 * grid[2]] == expected["image_grid_thw"][0].tolist()
        assert np.array_equal(pixels.patches(picture, grid), expected["pixel_values"])


def test_rows_of_released_models():
    """1920 x 1080 pixels are 2,040 rows, and no picture has more than 16,384."""
    vision = {**seeing.VISION, "patch_size": 16}
    pixels = qwen.Pixels(None, {"vision_config": vision})
    assert pixels.grid(1080, 1920) == (1, 34, 60)
    assert pixels.grid(7000, 7000) == (1, 128, 128)
    assert math.prod(pixels.grid(512, 1024, 512 * 512)) <= 256
    assert pixels.grid(1, 1) == (1, 8, 8)
    assert pixels.grid(1, 1, 1024) == pixels.grid(64, 64, 1024) == (1, 1, 1)  # less than the processor's minimum


REFUSED = {
    "features of inner blocks": {"deepstack_visual_indexes": [1]},
    "another activation": {"hidden_act": "silu"},
    "a head size": {"num_heads": 5},
    "no depth": {"depth": None},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_towers_of_another_kind_are_refused(kind):
    config = json.loads(json.dumps(CONFIG))
    config["vision_config"] |= REFUSED[kind]
    with pytest.raises((ValueError, TypeError)):
        qwen.Tower(config)


def test_settings_that_do_not_fit_the_tower_are_refused():
    with pytest.raises(ValueError, match=r"patch_size is 14; the tower in config\.json has 4"):
        qwen.Pixels({**seeing.PREPROCESSOR, "patch_size": 14}, CONFIG)


@pytest.mark.parametrize(("name", "depth"), [("qwen3.5-0.8b", 12), ("qwen3.5-27b", 27), ("qwen3.6-35b-a3b", 27)])
def test_names_of_released_towers(name, depth):
    """By the names in headers of released files; their shapes are not recorded."""
    found = published.read(next(file for file in published.FILES if file.stem == name))
    stored = {qwen.own_name(name) for name in found.tensors if name.startswith(qwen.PREFIXES)}
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304}
    module = qwen.Tower({"vision_config": {"depth": depth, "out_hidden_size": 5120, **sizes}})
    assert stored == {path.replace("patch_embed.", "patch_embed.proj.") for path in named(module)}
    assert depth != 27 or sum(w.size for w in named(module).values()) == pytest.approx(0.46e9, rel=0.05)


def test_families():
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"):
        assert find_tower({"model_type": family}) is qwen
    assert find_tower({"model_type": "glm4_moe"}) is None
