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

FILE = Path(__file__).with_name("launches.csv")
# By kind of layer, then by what is on ("none", a kind of KERNELS, "all"): launches at one row, and at more.
LAUNCHES: dict[str, dict[str, tuple[int, int]]] = {}
for _line in csv.DictReader(FILE.read_text().splitlines()[1:]):
    if _line["kind"]:
        LAUNCHES.setdefault(_line["kind"], {})[_line["kernels"]] = int(_line["one_row"]), int(_line["more_rows"])


def launches(kind: str, on: Collection[str], rows: int) -> int:
    """Look up those of one layer with no kernels on, with one kind of them, or with all."""
    name = "none" if not on else "all" if set(on) >= ALL else "".join(on)
    return LAUNCHES[kind][name][int(rows > 1)]
