"""Published times of MLX's passes: each states its source, a known chip and a known model, and has a prediction."""

from collections import Counter

import pytest

from bench.cost_model.published import CONTEXT, read_passes
from mlx_mtp.bench.roofline.assemble import FloorSubject, bench_model
from mlx_mtp.bench.roofline.chips import CHIPS, fitted_chips, read_fitted
from mlx_mtp.bench.roofline.cost import PassShape, of_model, seconds
from mlx_mtp.bench.roofline.models import MODELS
from mlx_mtp.bench.roofline.tables import published_table, tables

LINES = read_passes()


def of(line):
    """Return what identifies a published time: source, chip, model, bits, rows, ms."""
    return line["source"], line["chip"], line["model"], int(line["bits"]), int(line["m"]), float(line["ms"])


def printed(chip):
    """Return the rows of cells of published times that `bench model` prints for a chip; None for all chips."""
    model = MODELS["Qwen3.6-27B"]
    found = bench_model(FloorSubject("Qwen3.6-27B", "", model), chip and fitted_chips()[chip], CONTEXT, rows=[2])
    shown = [table for table in tables(found) if table.title == published_table(()).title]
    return [cells for table in shown for cells in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['source']}, {line['m']} rows")
def test_each_time_has_a_source_a_chip_and_a_model_and_a_prediction_of_its_own(line):
    source, chip, model, bits, m, ms = of(line)
    assert source.strip()
    assert chip in CHIPS
    assert model in MODELS
    stored = [
        x for x in read_fitted()["validation"]["passes"] if (x["source"], x["chip"], x["m"]) == (source, chip, m)
    ]
    (found,) = [x for x in stored if (x["model"], x["bits"]) == (model, bits)]
    costs = of_model(MODELS[model].with_fields(bits=bits), PassShape(m, context=CONTEXT), fitted_chips()[chip])
    assert (found["published"], found["fitted"]) == (ms / 1e3, False)
    assert found["predicted"] == pytest.approx(seconds(costs, fitted_chips()[chip]), rel=1e-9)
    assert found["predicted"] > 0.4 * found["published"]


def test_no_time_is_given_twice():
    assert max(Counter(map(of, LINES)).values()) == 1


@pytest.mark.parametrize("chip", [None, *sorted({line["chip"] for line in LINES})])
def test_a_chips_table_has_each_of_its_times_beside_its_prediction(chip):
    cells = printed(chip)
    stored = read_fitted()["validation"]["passes"]
    predicted = {(x["source"], x["chip"], x["model"], x["bits"], x["m"]): x["predicted"] for x in stored}
    for source, name, model, bits, m, ms in map(of, LINES):
        if chip in (None, name):
            own = f"{ms:.1f}", f"{predicted[source, name, model, bits, m] * 1e3:.1f}"
            at = [row for row in cells if row[:4] == (source, name, f"{model}, {bits} bits", str(m))]
            assert [row[6:8] for row in at] == [own]
    assert {row[1] for row in cells} == ({chip} if chip else {x["chip"] for x in stored})


def test_a_chip_without_published_times_has_no_such_table():
    assert printed("M1") == []
