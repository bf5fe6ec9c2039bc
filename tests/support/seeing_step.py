"""Write tiny random Step-3.7 checkpoints with heads, a vision tower, a tokenizer and a chat template."""

import json
from pathlib import Path

import families
import seeing
import tiny
from shapes import Shapes

MARKS = ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>")
SPECIAL = [*seeing.SPECIAL[:3], *MARKS]
VOCAB = {token: i for i, token in enumerate([*seeing.ALPHABET, *SPECIAL])}
TEMPLATE = seeing.TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<im_patch>")
# An overview of 24 x 24 pixels is 9 rows, a tile of 16 x 16 pixels is 4.
VISION = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "mlp_ratio": 2.5,
    "image_size": 24,
    "patch_size": 2,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "use_cls_token": False,
    "use_ln_post": False,
}
PREPROCESSOR = {"size": {"height": 24, "width": 24}, "patch_size": 16, "max_image_size": 96}
TEXT = {**tiny.CONFIG, "vocab_size": 272}
CONFIG = {
    "model_type": "step3p7",
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": VOCAB["<im_patch>"],
    "projector_bias": False,
}


def tower_shapes() -> Shapes:
    """Return the tower's and the projector's tensors by the names of released checkpoints."""
    D, inner, patch = VISION["width"], int(VISION["width"] * VISION["mlp_ratio"]), VISION["patch_size"]
    shapes: Shapes = {"conv1.weight": (D, 3, patch, patch), "positional_embedding": (144, D)}
    for i in range(VISION["layers"]):
        layer = {"attn.in_proj_weight": (3 * D, D), "attn.in_proj_bias": (3 * D,)}
        layer |= {"attn.out_proj.weight": (D, D), "attn.out_proj.bias": (D,)}
        layer |= {"mlp.c_fc.weight": (inner, D), "mlp.c_fc.bias": (inner,)}
        layer |= {"mlp.c_proj.weight": (D, inner), "mlp.c_proj.bias": (D,)}
        layer |= {f"ls_{n}.gamma": (D,) for n in (1, 2)}
        layer |= {f"ln_{n}.{kind}": (D,) for n in (1, 2) for kind in ("weight", "bias")}
        shapes |= {f"transformer.resblocks.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {f"ln_pre.{kind}": (D,) for kind in ("weight", "bias")}
    for n in (1, 2):
        shapes |= {f"vit_downsampler{n}.weight": (2 * n * D, n * D, 3, 3), f"vit_downsampler{n}.bias": (2 * n * D,)}
    named = {f"vision_model.{name}": shape for name, shape in shapes.items()}
    return named | {"vit_large_projector.weight": (TEXT["hidden_size"], 4 * D)}


def build(path: Path) -> tuple[Path, dict]:
    """Write a checkpoint directory with tokenizer and preprocessor_config.json; return it and its tensors."""
    weights = tiny.random_weights(TEXT) | families.random_weights(tower_shapes(), 3, scale=0.1)
    tiny.save(path, CONFIG, weights)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    seeing.tokenizer(SPECIAL, TEMPLATE).save_pretrained(path)
    return path, weights
