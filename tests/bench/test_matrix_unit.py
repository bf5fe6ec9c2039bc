"""The arithmetic of the GPU's matrix unit in `mlx-mtp doctor`: read, and shown as a line."""

import json

import pytest
from doctor_results import COUNTED, found_of
from metal_cases import linux_only

from mlx_mtp import emulator
from mlx_mtp.bench import doctor
from mlx_mtp.bench.doctor_page import matrix_unit, page, verdict
from mlx_mtp.kernels import MatrixOrder


def orders_of(**hows):
    return {"orders": {dtype: MatrixOrder(*how)._asdict() for dtype, how in hows.items()}}


FORWARD, ROUNDED = ("forward", True, "nearest"), ("forward", False, "nearest")
UNKNOWN = ("", True, "truncated", (7.0, -64.0))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"not_read": "no Metal GPU"}, "not read (no Metal GPU)"),
        ({"failed": "RuntimeError: r"}, "not read (RuntimeError: r)"),
        (
            orders_of(float32=FORWARD, float16=FORWARD, bfloat16=FORWARD),
            'adds eight products in the order "forward", fused, rounded to nearest (float32, float16, bfloat16)',
        ),
        (
            orders_of(float32=ROUNDED, float16=FORWARD, bfloat16=("pairs", True, "truncated")),
            'adds eight products in the order "forward", each rounded first, rounded to nearest (float32, float16); '
            'in the order "pairs", each rounded first, truncated (bfloat16)',
        ),
        (
            orders_of(float32=UNKNOWN, float16=("", True, "wide")),
            "adds eight products in an unknown order with the sums 7 -64, fused, truncated (float32); "
            "exactly, fused, and rounds once (float16)",
        ),
    ],
)
def test_the_arithmetic_of_the_matrix_unit_is_a_line(part, words):
    """Only a failure is a fault."""
    found = found_of(COUNTED, matrix_unit=part)
    assert matrix_unit(part) == f"Matrix unit: {words}"
    assert verdict(found)[0] == ("failed" not in part)
    section = page(found).partition("## Matrix unit\n\n")[2].partition("\n\n##")[0]
    assert section == (f"Failed: {part['failed']}" if "failed" in part else f"Matrix unit: {words}.")


@linux_only
def test_the_matrix_unit_is_read(monkeypatch):
    monkeypatch.setattr(doctor, "lacking", dict)
    with emulator.emulated(emulator.Options(matrix_order="halves", traffic=False)):
        found = doctor.matrix_unit()
    assert json.loads(json.dumps(found)) == {
        "orders": {
            dtype: {"name": "halves", "fused": True, "rounding": "nearest", "signature": []}
            for dtype in ("float32", "float16", "bfloat16")
        }
    }
    assert doctor.matrix_unit() == {"not_read": "no Metal GPU"}
    monkeypatch.setattr(doctor, "lacking", lambda: {"bfloat16": "error: no such type"})
    assert doctor.matrix_unit() == {"not_read": "the GPU does not support bfloat16"}
