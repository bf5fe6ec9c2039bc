"""Save random adapters in PEFT's form for a tiny MiMo with the letters' tokenizer."""

import json

import families
import mlx.core as mx
from letter_chats import make_tokenizer

from mlx_mtp.layers.adapters import shape_of


def checkpoint(path):
    """Save a tiny checkpoint with a head and a tokenizer, which has three tokens too many; return its path."""
    path, _, _ = families.build("mimo", path)
    make_tokenizer()._tokenizer.save_pretrained(path)
    return path


def save(path, model, seed, names=("q_proj", "o_proj"), rank=3, scale=0.4):
    """Save an adapter for all of the model's modules with these names, except those of heads."""
    keys, tensors = iter(mx.random.split(mx.random.key(seed), 64)), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names and not name.startswith("mtp."):
            size, width = shape_of(module)
            begin = f"base_model.model.{name}.lora_"
            tensors[f"{begin}A.weight"] = mx.random.normal((rank, width), key=next(keys)) * scale
            tensors[f"{begin}B.weight"] = mx.random.normal((size, rank), key=next(keys)) * scale
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(names)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
