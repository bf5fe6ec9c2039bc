"""Our kernels beside stock MLX on a Mac's GPU: are their bits right, and how much faster are they?

    python bench/kernels.py [--op verify_qmm] [--rows 8] [--out FILE]

Shapes are those of released models, in bfloat16, with random weights, four layers of each so that caches stay cold.
Times are of dependent chains, both sides in turn (`mlx_mtp/trial_run.py`); shown is stock MLX's over the kernel's.
The last line is one JSON object. Off Metal nothing can be timed; `mlx-mtp emulate` counts traffic anywhere.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
from decode import environment
from mlx_lm.models import qwen3_5

from mlx_mtp.kernels import on_metal
from mlx_mtp.layers.verify import GLU, Dense, Recurrence, Stack
from mlx_mtp.models.qwen3_5 import GatedDeltaNet
from mlx_mtp.recurrent_cache import RecurrentCache
from mlx_mtp.switch import trials
from mlx_mtp.trial_run import check, time_pair

LAYERS = 4
# Qwen3.6-27B's gated-delta layers.
DELTA = {
    **{"model_type": "qwen3_5_text", "hidden_size": 5120, "linear_num_value_heads": 48, "linear_num_key_heads": 16},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}


def linear(n: int, k: int, bits: int = 4, group_size: int = 64) -> nn.QuantizedLinear:
    made = nn.QuantizedLinear(k, n, bias=False, group_size=group_size, bits=bits)
    made.set_dtype(mx.bfloat16)
    return made


def stack(*heights: int, k: int, **more) -> Stack:
    return Stack([linear(n, k, **more) for n in heights])


def glu(h: int, k: int) -> GLU:
    gate, up = linear(h, k), linear(h, k)
    gate.site = up.site = Stack([gate, up])
    return GLU(SimpleNamespace(gate_proj=gate, up_proj=up))


def dense(n: int, k: int) -> Dense:
    made = nn.Linear(k, n, bias=False)
    made.set_dtype(mx.bfloat16)
    return Dense(made)


def delta() -> Recurrence:
    layer = GatedDeltaNet(qwen3_5.TextModelArgs.from_dict(DELTA))
    layer.set_dtype(mx.bfloat16)
    return Recurrence(layer, RecurrentCache)


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "Qwen3.6-27B q, k, v": ("verify_qmm", lambda: stack(12288, 1024, 1024, k=5120)),
    "Qwen3.6-27B qkv, z, b, a": ("verify_qmm", lambda: stack(10240, 6144, 48, 48, k=5120)),
    "Qwen3.6-27B down": ("verify_qmm", lambda: stack(5120, k=17408)),
    "Qwen3.6-27B LM head": ("verify_qmm", lambda: stack(248320, k=5120)),
    "Step-3.5 q, k, v, g": ("verify_qmm", lambda: stack(12288, 1024, 1024, 96, k=4096)),
    "Step-3.5 LM head, 8 bits": ("verify_qmm", lambda: stack(128896, k=4096, bits=8)),
    "Qwen3.6-27B gate, up": ("verify_glu", lambda: glu(17408, 5120)),
    "Step-3.5 shared expert": ("verify_glu", lambda: glu(1280, 4096)),
    "GLM-4.5 router": ("verify_gemv", lambda: dense(160, 5120)),
    "Qwen3.5 shared expert's gate": ("verify_gemv", lambda: dense(1, 2048)),
    "eh_proj": ("verify_gemv", lambda: dense(4096, 8192)),
    "Qwen3.6-27B recurrence": ("gated_delta_verify", delta),
}


@click.command(help=__doc__)
@click.option("--op", type=click.Choice(sorted({op for op, _ in CASES.values()})), help="Only this kernel.")
@click.option("--rows", type=click.IntRange(2, 8), default=8, help="Most rows M.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")
def main(op: str | None, rows: int, out: Path | None) -> None:
    if not on_metal():
        raise click.ClickException("there is no Metal GPU to time kernels on; `mlx-mtp emulate` counts their traffic")
    found = {}
    for name, (kind, make) in CASES.items():
        if op in (None, kind):
            sites = [make() for _ in range(LAYERS)]
            kept = [trial for trial in trials(sites, mx.bfloat16) if trial.rows <= rows]
            found[name] = {trial.rows: {"wrong": check(trial), "ratio": time_pair(trial)} for trial in kept}
            print(f"{kind:<19} {name:<26} " + "  ".join(cell(m, r) for m, r in found[name].items()), flush=True)
    result = json.dumps({**environment(), "kernels": found})
    if out is not None:
        out.write_text(result + "\n")
    print(result)


def cell(m: int, result: dict) -> str:
    return f"M={m} {result['ratio']:.2f}x{' WRONG: ' + result['wrong'] if result['wrong'] else ''}"


if __name__ == "__main__":
    main()
