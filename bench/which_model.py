"""Print the README's table of models: sizes of released checkpoints and of their conversions by `convert -q`.

    python bench/which_model.py

A download is the released weights (sources in `tests/support/fixtures/`). A conversion's model is built from the
released config.json, quantized as by `convert -q` with its heads in 8 bits, and counted as by `mlx-mtp inspect`, on a
CPU. No weights are read or drawn.
"""

import math
import sys
from pathlib import Path
from typing import Any

import click

from mlx_mtp.bench.random_model import head_count
from mlx_mtp.checkpoint.build import read_args
from mlx_mtp.checkpoint.convert_precision import Precision, format_of, format_of_heads
from mlx_mtp.decoding.memory_needs import needs
from mlx_mtp.models import find_port

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.append(str(SUPPORT))

import published  # noqa: E402

MODELS = {  # official repository: the fixture of its config.json and files, or of a model of the same sizes
    "Qwen/Qwen3.5-0.8B": "qwen3.5-0.8b",
    "XiaomiMiMo/MiMo-7B-RL": "mimo-7b",
    "zai-org/GLM-4.7-Flash": "glm-4.7-flash",
    "Qwen/Qwen3.6-27B": "qwen3.5-27b",
    "Qwen/Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "nemotron-3-super",
    "stepfun-ai/Step-3.5-Flash": "step-3.5-flash",
    "XiaomiMiMo/MiMo-V2-Flash": "mimo-v2-flash",
    "zai-org/GLM-4.7": "glm-4.6",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "zai-org/GLM-5.1": "glm-5.1",
}
MACS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # GB of memory in available Macs
USED = 0.75  # share that macOS lets a GPU use
CONTEXT = 8000  # tokens


def row(repository: str) -> str:
    """Return the model's line of the table."""
    fixture = MODELS[repository]
    few, many = (quantized(fixture, bits) for bits in (4, 8))
    needed = needs(few, CONTEXT).total
    mac = next((f"{size} GB" for size in MACS if needed < USED * size * 1e9), "none")
    sizes = (released(fixture), needs(few, 0).total, needed, needs(many, 0).total)
    return f"| {mac} | `{repository}` | {' | '.join(map(in_gb, sizes))} |"


def released(fixture: str) -> int:
    """Return the bytes of the released weights."""
    tensors = published.read(SUPPORT / "fixtures" / f"{fixture}.txt").tensors
    return sum(math.prod(shape) * published.BYTES[dtype] for shape, dtype in tensors.values())


def quantized(fixture: str, bits: int) -> Any:
    """Return the model of a conversion to `bits` bits, whose weights are not evaluated."""
    file = SUPPORT / "fixtures" / f"{fixture}.txt"
    config = published.read_config(file)
    port: Any = find_port(config)
    model = port.Model(
        read_args(port, file, config), head_count(config, port.Model.SPEC), port.Model.SPEC.resolve(())
    )
    heads, named = format_of_heads(None, None, quantize=True)
    Precision(format_of(None, bits), heads=heads, heads_named=named).apply(model, "bfloat16")
    return model


def in_gb(size: int) -> str:
    """Format GB, with one decimal below ten."""
    return f"{size / 1e9:.0f} GB" if size >= 9.95e9 else f"{size / 1e9:.1f} GB"


@click.command(help=__doc__)
def main() -> None:
    for repository in MODELS:
        click.echo(row(repository))


if __name__ == "__main__":
    main()
