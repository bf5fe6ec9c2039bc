"""What the cost model gets right and wrong: predicted beside published, of rows that it was not fitted to."""

from collections.abc import Iterable, Sequence
from typing import Any

from .chips import Chip
from .cost import FORM, FORMS, Pass, of_op, seconds, step_times
from .fit import Prediction, Row, errors, fit, predict, split
from .ops import Attention
from .released import MODELS

# Plain steps, from shares of 692 GB/s published by omlx#2238; not fitted.
PLAIN = (
    ("M3 Ultra", "Qwen3.6-35B-A3B", 0.338, ""),
    ("M3 Ultra", "Qwen3.6-27B", 0.939, "avlp12, which is fitted, has 29.7 ms"),
)
# GB/s of the cache that stock MLX's attention reached: query heads, KV heads, width, context, rows; not fitted.
ATTENTION = (
    ("mlx#4076", "M5 Pro", (8, 1, 128), 8192, 1, 190),
    ("mlx#4380", "M5 Pro", (12, 1, 128), 8192, 1, 124),
    ("mlx#4380", "M5 Pro", (16, 1, 128), 8192, 1, 99),
    ("MTPLX", "M5 Max 40c", (24, 4, 256), 131072, 1, 387),
    ("MTPLX", "M5 Max 40c", (24, 4, 256), 131072, 4, 160),
    ("mlx#3837", "M1 Ultra", (32, 4, 256), 100000, 1, 178),
    ("mlx#3837", "M1 Ultra", (32, 4, 256), 100000, 2, 76),
)


def fitted_to(chip: str, rows: Iterable[Row]) -> int:
    """How many published times of M <= 2 a chip's two constants were fitted to."""
    used = [row for row in rows if row.chip == chip]
    timed = {(row.source, row.base) for row in used if row.base_ms and row.base <= 2}
    return sum(row.m <= 2 for row in used) + len(timed)


def validation(rows: Sequence[Row], chips: dict[str, Chip]) -> dict[str, Any]:
    """Every published ratio of M rows beside the predicted one, and what is left over, by kind of row.

    rows: source, kind, chip, what, m, base, published, predicted, error, fitted, verdict. errors: of those that were
    not fitted. plain: published plain steps, not fitted either.
    """
    fitted, tested = split(predict(rows, chips))
    kinds = ("all", *sorted({p.row.kind for p in tested}))
    return {
        "rows": [_row(p, True) for p in fitted] + [_row(p, False) for p in tested],
        "errors": {kind: _errors([p for p in tested if kind in ("all", p.row.kind)]) for kind in kinds},
        "plain": [_plain(*line, chips) for line in PLAIN],
    }


def _row(p: Prediction, fitted: bool) -> dict[str, Any]:
    row = {name: getattr(p.row, name) for name in ("source", "kind", "chip", "what", "m", "base")}
    return {
        **row,
        **{"published": p.row.ratio, "predicted": p.ratio, "error": p.error},
        **{"fitted": fitted, "verdict": "fitted" if fitted else p.verdict},
    }


def _errors(tested: Sequence[Prediction]) -> dict[str, float]:
    return dict(zip(("median", "greatest", "within", "rows"), errors(tested), strict=True))


def _plain(chip: str, model: str, share: float, note: str, chips: dict[str, Chip]) -> dict[str, Any]:
    step = MODELS[model]
    published = (step.shared_bytes + step.routed_bytes) / (share * 692e9)
    seconds = step_times(step, chips[chip], Pass(1, context=512), (1,))[1]
    return {"chip": chip, "model": model, "published": published, "predicted": seconds, "note": note}


def attention(chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """GB/s of the cache in stock MLX's attention, published and predicted; neither fitted nor a test."""
    found = []
    for source, chip, (heads, kv, width), context, m, published in ATTENTION:
        costs = of_op(Attention(heads, kv, width), Pass(m, context=context), chips[chip])
        predicted = float(costs.nbytes.sum()) / seconds(costs, chips[chip]) / 1e9
        shape = f"{heads}/{kv}, {width}"
        made = {"source": source, "chip": chip, "shape": shape, "context": context, "m": m}
        found.append(made | {"published": published, "predicted": predicted, "error": predicted / published - 1})
    return found


def forms(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The errors with other forms of t(a, b), each fitted anew to M <= 2: form, caches, used, fitted, tested."""
    found = []
    for caches in (True, False):
        for form in FORMS:
            near, far = (errors(made) for made in split(predict(rows, fit(rows, form, caches), form, caches)))
            used = form == FORM and caches
            found.append({"form": form, "caches": caches, "used": used, "fitted": near, "tested": far})
    return found
