"""Default tests compare no times, which a busy machine changes: they count, replace the clock, or are marked."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("*.py"))
CLOCKS = "perf_counter", "monotonic", "time"  # not process_time: other programs do not add to it
LEAST = 20  # seconds that a test must wait for another thread or process


def has_clock(node: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(isinstance(f, ast.Attribute) and f.attr in CLOCKS and ast.unparse(f.value) == "time" for f in calls)


def is_elapsed(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression contains a difference of two times, or one of the names."""
    return any(
        (isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub) and has_clock(each))
        or (isinstance(each, ast.Name) and each.id in names)
        for each in ast.walk(node)
    )


def compared(source: str) -> list[int]:
    """Return the lines of assertions about elapsed times, and of waits below LEAST, in functions without the mark."""
    found = []
    functions = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef))
    for function in functions:
        if any("mark.timing" in ast.unparse(mark) for mark in function.decorator_list):
            continue
        assigned = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
        names = {
            t.id
            for each in assigned
            for t in each.targets
            if isinstance(t, ast.Name) and is_elapsed(each.value, set())
        }
        found += [
            each.lineno for each in ast.walk(function) if isinstance(each, ast.Assert) and is_elapsed(each, names)
        ]
        found += [
            each.lineno
            for each in assigned
            if isinstance(each.value, ast.BinOp)
            and has_clock(each.value)
            and isinstance(each.value.right, ast.Constant)
            and isinstance(each.value.op, ast.Add)
            and each.value.right.value < LEAST
        ]
    return found


def test_no_default_test_compares_times():
    assert not [f"{file.relative_to(HERE)}:{line}" for file in FILES for line in compared(file.read_text())]


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - tic < 5",
        "s = time.perf_counter() - tic; assert s > 1",
        "end = time.monotonic() + 5",
    ],
)
def test_comparisons_are_found(line):
    assert compared(f"def test_it():\n    {line}") == [2]
    assert not compared(f"@pytest.mark.timing\ndef test_it():\n    {line}")
    assert not compared("def test_it():\n    end = time.monotonic() + 60\n    assert time.monotonic() < end")
