"""Read published times of passes and products over several rows, with the operations that they measure."""

import csv
from dataclasses import dataclass
from pathlib import Path

from mlx_mtp.bench.roofline.chips import Chip
from mlx_mtp.bench.roofline.cost import PassCosts, PassShape, of_model, of_op
from mlx_mtp.bench.roofline.models import MODELS, gqa, mlp
from mlx_mtp.bench.roofline.ops import LayerOps, LinearOp, ModelOps

HERE = Path(__file__).parent
CONTEXT = 512  # of published whole passes, "short"


def dense_70b() -> ModelOps:
    """Describe Llama's shape at 70B with K2's vocabulary."""
    layer = LayerOps("glm dense", 80, (*gqa(8192, 64, 8, 128), *mlp(8192, 28672)))
    return ModelOps((layer,), LinearOp("lm_head", 250112, 8192))


@dataclass(frozen=True)
class PublishedPass:
    """One published ratio T(m) / T(base); base_ms is T(base), if given.

    Warm: T(1) implies more than the chip's bandwidth, so the weights came from its cache and memory is left out.
    """

    source: str
    kind: str
    chip: str
    what: str
    linear: LinearOp | None
    mlx: float
    warm: bool
    base: int
    base_ms: float | None
    m: int
    ratio: float
    reason: str

    def costs(self, m: int, chip: Chip, caches: bool = True) -> PassCosts:
        """Return the same cost for m rows."""
        at = PassShape(m, context=CONTEXT, mlx=self.mlx, caches=caches)
        if self.linear:
            found = of_op(self.linear, at, chip)
            return found._replace(nbytes=0 * found.nbytes) if self.warm else found
        return of_model(MODELS.get(self.what) or dense_70b(), at, chip)


def read_rows() -> list[PublishedPass]:
    """Return every published ratio that is predicted."""
    return [parse(line) for line in _lines("verify_published.csv")]


def read_unused() -> list[dict[str, str]]:
    """Return published figures that are not predicted: source, what, why."""
    return _lines("verify_unused.csv")


def read_passes() -> list[dict[str, str]]:
    """Return published times of stock MLX's passes: source, chip, model, bits, m, ms; speeds are converted to ms."""
    return _lines("passes_published.csv")


def _lines(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def parse(line: dict[str, str]) -> PublishedPass:
    """Convert a line's text to numbers."""
    sizes = [int(line[name]) for name in ("n", "k", "bits", "group")] if line["n"] else None
    return PublishedPass(
        source=line["source"],
        kind=line["kind"],
        chip=line["chip"],
        what=line["what"],
        linear=LinearOp(line["what"], *sizes) if sizes else None,
        mlx=float(line["mlx"]),
        warm=line["warm"] == "1",
        base=int(line["base"]),
        base_ms=float(line["base_ms"]) if line["base_ms"] else None,
        m=int(line["m"]),
        ratio=float(line["ratio"]),
        reason=line["reason"],
    )
