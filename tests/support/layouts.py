"""Store checkpoints in the layouts of published ones."""

import json

import families
import mlx.core as mx


def in_8_bits(weights: dict, scales: str) -> tuple[dict, dict]:
    """Return the stored and the dequantized projections' weights, with one scale per block, row or tensor.

    Rows that are no whole groups of 32 numbers are loaded as bfloat16.
    """
    stored, plain = dict(weights), dict(weights)
    for name, w in weights.items():
        if not name.endswith("_proj.weight") or w.ndim != 2 or "eh_proj" in name:
            continue
        scale = mx.abs(w).max(axis=1, keepdims=True) / 448
        if scales != "row":
            scale = scale.max(keepdims=True).reshape((1, 1) if scales == "block" else ())
        packed = mx.to_fp8(w / scale)
        stored[name] = packed
        stored[name + ("_scale_inv" if scales == "block" else "_scale")] = scale
        numbers = mx.from_fp8(packed, dtype=mx.float32) * scale
        plain[name] = numbers.astype(mx.bfloat16) if w.shape[1] % 32 else numbers
    return stored, plain


def unpacked(parameters: dict) -> dict:
    """Return parameters by path with the numbers, in float32, of 8-bit floats that have an output scale."""
    found = dict(parameters)
    for path in [name.removesuffix(".output_scale") for name in parameters if name.endswith(".output_scale")]:
        w = mx.dequantize(
            found[f"{path}.weight"], found.pop(f"{path}.scales"), None, 32, 8, "mxfp8", dtype=mx.float32
        )
        scale = found.pop(f"{path}.output_scale")
        found[f"{path}.weight"] = w * scale.reshape(*scale.shape, *[1] * (w.ndim - scale.ndim))
    return found


def in_shards(path):
    """Return a checkpoint directory of several shards, with an index and tokenizer files."""
    path, weights, _ = families.build("glm4_moe", path)
    (path / "model.safetensors").unlink()
    places = {}
    for i, (name, w) in enumerate(weights.items()):
        places.setdefault(f"model-{i * 4 // len(weights)}.safetensors", {})[name] = w
    for file, tensors in places.items():
        mx.save_safetensors(str(path / file), tensors, {"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in places.items() for name in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((path / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8"}, "vision_config": {}, "new": [1]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "LICENSE.md"):
        (path / name).write_text(f"the text of {name}")
    (path / "hf_quant_config.json").write_text("{}")
    (path / "dangling.json").symlink_to("nowhere")
    return path


def left(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
