"""Packed formats of released checkpoints: how a matrix is packed, its groups, and config.json's entry."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import families
import mlx.core as mx
import numpy as np
import packed_files as files

import mlx_mtp

FP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}


class Kind(NamedTuple):
    """A format: packs matrices whose rows are whole groups, and whose heights are multiples of `heights`."""

    pack: files.Pack
    group: int
    heights: int
    config: dict[str, Any]
    formats: str

    def packs(self, w: np.ndarray) -> bool:
        return w.ndim == 2 and w.shape[1] % self.group == 0 and w.shape[0] % self.heights == 0


def groups(**formats: tuple[list[str], str, int]) -> dict[str, Any]:
    """config.json's entry of compressed-tensors; formats: (targets, format, bits) by the group's name."""
    return {
        name: {"targets": targets, "format": form, "weights": {"num_bits": bits}}
        for name, (targets, form, bits) in formats.items()
    }


def compressed(form: str, **config: Any) -> dict[str, Any]:
    weights = {"group_0": {"targets": ["Linear"], "weights": config}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": weights, "ignore": ["lm_head"]}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
UE8M0 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
NVFP4, MXFP8, INT4 = "4-bit nvfp4 g16", "8-bit mxfp8 g32", "4-bit affine g32"
NV, CT = partial(files.nvfp4, reciprocal=False), partial(files.nvfp4, reciprocal=True)
ROWS, E8M0 = partial(files.mxfp8, block=(1, 32), dtype="U8"), partial(files.mxfp8, block=(32, 32), dtype="F8_E8M0")
V31, GPTQ_8 = partial(files.mxfp8, block=(128, 128), dtype="F32"), partial(files.gptq, bits=8, v2=True, zeros=True)
V2 = {"bits": 8, "checkpoint_format": "gptq_v2"}
INT8 = partial(files.pack_quantized, bits=8, zeros=True)
KINDS = {
    "modelopt": Kind(NV, 16, 1, MODELOPT, NVFP4),
    "compressed": Kind(CT, 16, 1, compressed("nvfp4-pack-quantized", **FP4_GROUP), NVFP4),
    "mxfp4": Kind(files.mxfp4, 32, 1, compressed("mxfp4-pack-quantized"), "4-bit mxfp4 g32"),
    "mxfp8": Kind(ROWS, 32, 1, {"quant_method": "mxfp8"}, MXFP8),
    "ue8m0 32": Kind(E8M0, 32, 1, UE8M0 | {"weight_block_size": [32, 32]}, MXFP8),
    "ue8m0 128": Kind(V31, 32, 1, UE8M0 | {"weight_block_size": [128, 128]}, MXFP8),
    "fp8 rows": Kind(files.fp8, 32, 1, compressed("float-quantized", num_bits=8), MXFP8),
    "fp8": Kind(partial(files.fp8, by_row=False), 32, 1, MODELOPT | {"quant_algo": "FP8"}, MXFP8),
    "awq": Kind(files.awq, 32, 8, AWQ, INT4),
    "gptq": Kind(files.gptq, 32, 8, GPTQ, INT4),
    "gptq asymmetric": Kind(partial(files.gptq, zeros=True), 32, 8, GPTQ | {"sym": False}, INT4),
    "gptq v2": Kind(GPTQ_8, 32, 4, GPTQ | V2, "8-bit affine g32"),
    "gptq 3": Kind(partial(files.gptq, bits=3), 32, 32, GPTQ | {"bits": 3}, "3-bit affine g32"),
    "int4": Kind(files.pack_quantized, 32, 1, compressed("pack-quantized", num_bits=4), INT4),
    "int8": Kind(INT8, 32, 1, compressed("pack-quantized", num_bits=8), "8-bit affine g32"),
}


def numpy(weights: dict[str, mx.array]) -> dict[str, np.ndarray]:
    return {name: np.array(w) for name, w in weights.items()}


def write(
    path: Path, family: str, choose: Callable[[str, np.ndarray], files.Pack | None], quantization: dict[str, Any]
) -> tuple[Path, Path]:
    """Return (a packed checkpoint, the same with the packed numbers in float32); the matrices are `choose`'s.

    family: of `families`, or a config of a family that mlx-lm alone supports.
    """
    if family in families.FAMILIES:
        hub, weights, _ = families.build(family, path / "hub")
    else:
        hub, _ = families.headless(path / "hub", json.loads(family))
        weights = dict(mx.load(str(hub / "model.safetensors")))
    tensors, config = numpy(weights), json.loads((hub / "config.json").read_text())
    stored, numbers = files.repack(tensors, lambda module: choose(module, tensors[f"{module}.weight"]))
    packed = files.save(path / "packed", config | {"quantization_config": quantization}, stored)
    return packed, files.save(path / "plain", config, numbers)


def linears(kind: Kind) -> Callable[[str, np.ndarray], files.Pack | None]:
    """Choose the projections that a format can pack, but not the matrix that fuses a head's inputs."""
    return partial(_projection, kind)


def _projection(kind: Kind, module: str, w: np.ndarray) -> files.Pack | None:
    return kind.pack if module.endswith("_proj") and "eh_proj" not in module and kind.packs(w) else None


def logits(model: Any, tokens: list[int]) -> mx.array:
    return model.logits(model.hidden(mx.array([tokens]), mlx_mtp.make_prompt_cache(model).layers))
