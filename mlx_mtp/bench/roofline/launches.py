"""Look up the launches of a layer with each kind of kernels on, as counted in recorded graphs.

`launches.csv` is written by `python bench/launches.py --out mlx_mtp/bench/roofline/launches.csv`.
"""

import csv
from collections.abc import Collection
from pathlib import Path

# The kernels that take the place of stock MLX, by what of a pass they change.
KERNELS = {
    "products": ("verify_qmm", "verify_glu", "verify_gemv", "verify_qmm_heads"),
    "experts": ("verify_moe",),
    "attention": ("verify_attention", "verify_latent_attention"),
    "recurrence": ("gated_delta_verify",),
    "head": ("verify_head",),
    "norms": ("norm_rope", "add_norm"),
}
ALL = frozenset(KERNELS)

# Kinds of layers: the model and the layer of it whose launches were counted.
KINDS = {
    "step dense": ("Step-3.5-Flash", "dense, sliding"),
    "step experts": ("Step-3.5-Flash", "experts, sliding"),
    "glm dense": ("GLM-4.5", "dense"),
    "glm experts": ("GLM-4.5", "experts"),
    "qwen delta": ("Qwen3.6-27B", "gated delta"),
    "qwen attention": ("Qwen3.6-27B", "attention"),
    "qwen delta experts": ("Qwen3.6-35B-A3B", "gated delta, experts"),
    "qwen attention experts": ("Qwen3.6-35B-A3B", "attention, experts"),
    "deepseek dense": ("DeepSeek-V3", "dense"),
    "deepseek experts": ("DeepSeek-V3", "experts"),
}

FILE = Path(__file__).with_name("launches.csv")
_LINES = list(csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")))
# By kind of layer, then by what is on ("none", a kind of KERNELS, "all"): launches at one row, and at more.
LAUNCHES = {
    kind: {x["kernels"]: (int(x["one_row"]), int(x["more_rows"])) for x in _LINES if (x["model"], x["of"]) == where}
    for kind, where in KINDS.items()
}


def launches(kind: str, on: Collection[str], rows: int) -> int:
    """Look up those of one layer with no kernels on, with one kind of them, or with all."""
    name = "none" if not on else "all" if set(on) >= ALL else "".join(on)
    return LAUNCHES[kind][name][int(rows > 1)]
