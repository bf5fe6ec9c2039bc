"""Count the instructions per weight of products in the lane `matrix`, in the listing of an AMD GPU's compiler.

    python -m bench.instructions

Apple's compiler runs only on Macs, so `tests/support/registers.py` stands in for it. Instructions are those of a lane
in the loops that multiply, in whole blocks of K, where all guards are passed; the rest runs once per threadgroup.
`arithmetic` is what the cost model takes: vector instructions and moves between lanes. Apart are `addresses` (sums of
64 bits, two instructions here; a Mac's load adds base and offset itself) and `control` (loop counters, branches).
Loads, waits and 8x8 products do not count. The second table has a 27B's rows, with and without those apart.
"""

import itertools
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import click
import mlx.core as mx
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from registers import listing

from mlx_mtp import kernels
from mlx_mtp.bench.kernel_launches import rows, weights
from mlx_mtp.bench.result import new_table
from mlx_mtp.bench.roofline import cost
from mlx_mtp.bench.roofline.chips import fitted_chips
from mlx_mtp.bench.roofline.models import MODELS
from mlx_mtp.emulator.texts import recorded
from mlx_mtp.kernels._matrix import ROWS_ONCE, SIDE, TWIN_ROWS, matrix_tile
from mlx_mtp.kernels.matrix_products import matrix_gemv, matrix_qmm

N, K = 8192, 4096
CHIPS = "M3 Ultra", "M5 Max 40c"
FORMATS = {
    "affine 4": ("affine", 4, 64),
    "affine 6": ("affine", 6, 64),
    "affine 8": ("affine", 8, 64),
    "mxfp4": ("mxfp4", 4, 32),
    "nvfp4": ("nvfp4", 4, 16),
    "iq4_xs": ("iq4_xs", 4, 32),
    "q6_k": ("q6_k", 6, 16),
    "bfloat16": None,
}
ROWS = (*range(1, TWIN_ROWS + 1), SIDE, ROWS_ONCE)
# A listing's blocks, each with the loops that it opens or is in.
BLOCK = re.compile(r"^(?=\.LBB|; %bb)", re.MULTILINE)
LABEL = re.compile(r"\.L(BB\w+):|; %bb()")
HEADER, PARENT = re.compile(r"=>\s*This (?:Inner )?Loop Header"), re.compile(r"Parent Loop (BB\w+) Depth=")
INSIDE = re.compile(r"in Loop: Header=(BB\w+) Depth=")
UNCOUNTED = re.compile(r"s_(waitcnt|delay_alu|clause|nop|set_inst_prefetch)|(global|ds|s|scratch|flat)_(load|store)")
ADDRESS = re.compile(r"v_(add|sub)_co_|s_(addc?|subb?)_u32|[vs]_(mad|lshl|lshlrev)_\w*64\b")
WHOLE = re.compile(r"k ?\+ ?U::PART ?<= ?K")  # unquantized rows have a second path for a part at the end
KINDS = "arithmetic", "addresses", "control"


class Instructions(NamedTuple):
    """Instructions of a lane per weight by KINDS; multiply-adds among them, and those that 8x8 products replace."""

    arithmetic: float
    addresses: float
    control: float
    fma: float
    products: float

    @property
    def total(self) -> float:
        """All instructions, addresses and control included."""
        return self.arithmetic + self.addresses + self.control


def by_loop(assembly: str) -> dict[tuple[str, ...], Counter[str]]:
    """Return a listing's instructions of function `registers` by loop, a path of headers from outside, and kind."""
    body = assembly[assembly.index("\nregisters:") : assembly.index(".Lfunc_end0")]
    blocks = [(label[1], block) for block in BLOCK.split(body) if (label := LABEL.match(block))]
    outer = {label: PARENT.findall(block) for label, block in blocks if HEADER.search(block)}
    found: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for label, block in blocks:
        inside = [label] if label in outer else INSIDE.findall(block)
        path = tuple(header for name in inside for header in (*outer[name], name))
        for line in block.splitlines():
            for each in line.strip().split(" :: "):
                found[path].update(kinds(each))
    return found


def kinds(instruction: str) -> list[str]:
    """Return the kind of an instruction, and "fma" or "product" if it is one; [] if it does not count."""
    name = instruction.split(" ")[0]
    if instruction.startswith("; simdgroup_multiply_accumulate"):
        return ["product"]
    if instruction.startswith("; "):  # functions of Metal that registers.h defines
        return ["arithmetic"] if re.match(r"; \w+ v\d", instruction) else []
    if not re.match(r"[vs]_\w+", name) or UNCOUNTED.match(name):
        return []
    if ADDRESS.match(name):
        return ["addresses"]
    if name.startswith("s_"):
        return ["control"]
    return ["arithmetic", "fma"] if re.match(r"v_(dual_)?(pk_)?fma", name) else ["arithmetic"]


def counted(assembly: str, trips: tuple[float, ...], weights_of_lane: float) -> Instructions:
    """Return a listing's instructions per weight, of the outermost loop with the most multiplications.

    trips: by depth, how often a loop runs while a lane takes its share `weights_of_lane`.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for path, found in by_loop(assembly).items():
        for kind, n in found.items() if path else ():
            sums[path[0]][kind] += n * trips[len(path) - 1]
    of = max(sums.values(), key=lambda found: (found["product"], found["fma"]))
    fma_of_product = SIDE**3 / 32
    values = [*(of[kind] for kind in KINDS), of["fma"], of["product"] * fma_of_product]
    return Instructions(*(value / weights_of_lane for value in values))


def text_of(of: tuple[str, int, int] | None, m: int) -> tuple[str, str]:
    """Return the text that multiplies m rows in the lane `matrix`, of whole blocks of K, and its kernel."""
    x = rows(m, K, mx.bfloat16)
    with recorded() as found:
        matrix_gemv(x, mx.zeros((N, K), mx.bfloat16)) if of is None else matrix_qmm(x, weights(of, N, K, mx.bfloat16))
    text, blocks = WHOLE.subn("true", found[0].text.text)
    assert blocks == 2, blocks  # in the twin and in matrices
    return text, found[0].text.kernel


def of_matrix(of: tuple[str, int, int] | None, m: int) -> Instructions:
    """Return the instructions of m rows in the lane `matrix`, in the tile of tall weights."""
    w = mx.zeros((N, K), mx.bfloat16) if of is None else weights(of, N, K, mx.bfloat16)
    tile = matrix_tile(rows(m, K, mx.bfloat16), N, w)
    if tile.rows > TWIN_ROWS:  # a simdgroup takes a block of 64 values at a time, four per turn
        return counted(listing(*text_of(of, m)), (1 / 4, 1), 64 * tile.height / 32)
    parts = 64 / (16 if of and of[2] < 32 else 32)  # a lane takes a block, part by part
    return counted(listing(*text_of(of, m)), (1, parts), 64 * tile.height / 8)


def of_exact() -> Instructions:
    """Return the instructions of `verify_qmm` at one row, 4 bits: 16 values of 4 weight rows at a time."""
    with recorded() as found:
        kernels.verify_qmm(rows(1, K, mx.bfloat16), weights(FORMATS["affine 4"], N, K, mx.bfloat16))
    return counted(listing(found[0].text.text, found[0].text.kernel), (1,), 64)


def plain_steps(chip: str, m: int, lane: dict[str, tuple[float, ...]], model: str = "Qwen3.6-27B") -> float:
    """Return a pass of m rows after 4,096 tokens in the lane `matrix`, over one row in `exact`.

    lane: instructions per weight, as MATRIX_LANE.
    """
    of, on = MODELS[model], fitted_chips()[chip]
    shapes = cost.PassShape(1, cost.ALL), cost.PassShape(m, cost.ALL, lane="matrix")
    with patch.dict(cost.MATRIX_LANE, lane):
        plain, rows = (cost.seconds(cost.of_model(of, at, on), on) for at in shapes)
    return rows / plain


@click.command(help=__doc__)
def main() -> None:
    console, lane = Console(width=120), {name: [of_matrix(of, m) for m in ROWS] for name, of in FORMATS.items()}
    table = new_table("instructions per weight", "weights", "rows", *KINDS, "total", "fma", "products", left=1)
    for name, counts in {"affine 4, verify_qmm": [of_exact()], **lane}.items():
        for m, count in zip(ROWS, counts, strict=False):
            values = (*count[: len(KINDS)], count.total, count.fma, count.products)
            table.add_row(name, str(m), *(f"{x:.2f}" for x in values), end_section=count is counts[-1])
    console.print(table)
    table = new_table("Qwen3.6-27B, 4 bits, in plain steps", "chip", "counted", *(f"M={m}" for m in ROWS), left=2)
    for chip, kind in itertools.product(CHIPS, ("arithmetic", "total")):
        chosen = {name: tuple(getattr(count, kind) for count in counts) for name, counts in lane.items()}
        table.add_row(chip, kind, *(f"{plain_steps(chip, m, chosen):.3f}" for m in ROWS))
    console.print(table)


if __name__ == "__main__":
    main()
