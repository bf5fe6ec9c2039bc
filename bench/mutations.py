"""Break the package's code one line at a time at random, and count the breaks that the tests find.

    python bench/mutations.py trace trace.jsonl                     run the suite once, recording each test's
    functions
    python bench/mutations.py run trace.jsonl --out found.json      60 breaks, drawn over all rooms from a fixed seed
    python bench/mutations.py run trace.jsonl --like found.json     the same breaks in another version of the code

A break changes one operator, comparison or constant in one line of a copy of this checkout. Then the tests that enter
the function run, the fastest first, until one fails. For a module's own lines all tests of its functions run.
"""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
COPIED = ("mlx_mtp", "tests", "bench", "kernels", "pyproject.toml", "README.md", "CONTRIBUTING.md", ".ci", ".github")
COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    " in ": " not in ",
    " is not ": " is ",
}
OPERATORS = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "+", "**": "*"}
SKIPPED = {"demo"}  # rooms without code


@dataclass(frozen=True)
class Break:
    """A change: `line` of `function` in `file` becomes `broken`; both without indentation."""

    file: str
    function: str
    line: str
    broken: str
    nth: int = 0  # index among equal lines of that function
    red: bool | None = None
    by: str = ""


def breaks_of(file: Path, root: Path) -> list[Break]:
    """Return every possible break of a file's lines."""
    text = file.read_text()
    tree, lines, found = ast.parse(text), text.splitlines(), []
    owner = {}
    for node, name in functions(tree):
        owner.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), name))
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, line in enumerate(lines, 1):
        seen[owner.get(number, ""), line.strip()].append(number)
    annotations = {id(inner) for node in ast.walk(tree) for inner in annotated(node)}
    for node in ast.walk(tree):
        if id(node) in annotations or getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:
            continue
        line, name = lines[node.lineno - 1], owner.get(node.lineno, "")
        for start, end, new in changes(node, line):
            broken = line.encode()[:start].decode() + new + line.encode()[end:].decode()
            nth = seen[name, line.strip()].index(node.lineno)
            found.append(Break(str(file.relative_to(root)), name, line.strip(), broken.strip(), nth))
    return found


def functions(tree: ast.AST, prefix: str = ""):
    """Yield (function's node, its qualified name), outer functions first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, prefix + node.name
            yield from functions(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def annotated(node: ast.AST):
    """Yield the nodes in annotations, which are never evaluated or compared."""
    for name in ("annotation", "returns"):
        if (inner := getattr(node, name, None)) is not None:
            yield from ast.walk(inner)


def changes(node: ast.AST, line: str):
    """Yield (start byte, end byte, new text) of every change of a node that fits in its line."""
    code = line.encode()
    if isinstance(node, ast.Compare):
        yield from swapped(code, node.left.end_col_offset, node.comparators[0].col_offset, COMPARISONS)
    elif isinstance(node, ast.BinOp):
        yield from swapped(code, node.left.end_col_offset, node.right.col_offset, OPERATORS)
    elif isinstance(node, ast.BoolOp):
        words = {"and": "or", "or": "and"}
        yield from swapped(code, node.values[0].end_col_offset, node.values[1].col_offset, words)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.col_offset, node.operand.col_offset, ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node.col_offset, node.end_col_offset, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node.col_offset, node.end_col_offset, repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield node.test.col_offset, node.test.end_col_offset, f"not ({ast.unparse(node.test)})"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node.value.col_offset, node.value.end_col_offset, "None"


def swapped(code: bytes, start: int, end: int, table: dict[str, str]):
    """Yield the change of the one operator between two operands."""
    between = code[start:end].decode()
    for old in sorted(table, key=len, reverse=True):
        if between.strip("() ") == old:
            yield start, end, between.replace(old, table[old], 1)
            return


def draw(root: Path, count: int, seed: int) -> list[Break]:
    """Draw `count` breaks from the rooms in turn; within a room each line is equally likely."""
    rooms: dict[str, list[Break]] = defaultdict(list)
    for file in sorted((root / "mlx_mtp").rglob("*.py")):
        inside = file.relative_to(root / "mlx_mtp").parts
        room = inside[0] if len(inside) > 1 else "hall"
        if room not in SKIPPED:
            rooms[room] += breaks_of(file, root)
    rng = random.Random(seed)
    orders = [rng.sample(rooms[room], len(rooms[room])) for room in sorted(rooms)]
    turns = [order[i] for i in range(max(map(len, orders))) for order in orders if i < len(order)]
    return turns[:count]


def found_again(broken: Break, candidates: list[Break]) -> Break | None:
    """Find the same break in another version: in a function of the same name with that line, in any file."""
    same = [
        candidate
        for candidate in candidates
        if candidate.function.split(".")[-1] == broken.function.split(".")[-1]
        and (candidate.line, candidate.broken) == (broken.line, broken.broken)
    ]
    return same[min(broken.nth, len(same) - 1)] if same else None


def tests_of(broken: Break, trace: list[dict], budget: float) -> list[str]:
    """Return the tests that enter the function (for a module's own line any function of its file), fastest first."""
    file, name = broken.file.removeprefix("mlx_mtp/"), broken.function
    seen = [t for t in trace if any(f == file and name in ("", q) for f, q, *_ in t["f"])]
    if not seen:  # a module without functions, or code that runs only in another process
        seen = [t for t in trace if any(f.split("/")[0] == file.split("/")[0] for f, *_ in t["f"])]
    chosen, spent = [], 0.0
    for test in sorted(seen, key=lambda t: t["s"]):
        spent += test["s"]
        if spent > budget and chosen:
            break
        chosen.append(test["id"])
    return chosen


def is_red(broken: Break, tree: Path, tests: list[str], limit: float) -> tuple[bool, str]:
    """Return the test that fails with the break in place, if any."""
    file = tree / broken.file
    text = file.read_text()
    lines, names = text.splitlines(keepends=True), {}
    for node, name in functions(ast.parse(text)):
        names.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), name))
    places = [
        i for i, line in enumerate(lines) if (names.get(i + 1, ""), line.strip()) == (broken.function, broken.line)
    ]
    place = places[broken.nth]
    lines[place] = lines[place].replace(broken.line, broken.broken)
    ids = tree / "ids.txt"
    ids.write_text("\n".join(tests))
    try:
        file.write_text("".join(lines))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"@{ids}"]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit)
        failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return done.returncode not in (0, 5), (failures or [f"exit code {done.returncode}"])[0]
    except subprocess.TimeoutExpired:
        return True, f"not done after {limit:.0f} s"
    finally:
        file.write_text(text)


@click.group(help=__doc__)
def main() -> None:
    """Draw breaks and run the tests that see them."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def trace(file: Path) -> None:
    """Run the suite and write the functions that each test enters to FILE, a line of JSON per test."""
    environment = {**os.environ, "TRACE_ROOT": str(ROOT), "TRACE_OUT": str(file.resolve())}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    subprocess.run([sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "call_trace"], cwd=ROOT, env=environment)
    parts = sorted(file.parent.glob(f"{file.name}.gw*"))
    file.write_text("".join(part.read_text() for part in parts))
    for part in parts:
        part.unlink()


@main.command()
@click.argument("trace_file", type=click.Path(exists=True, path_type=Path))
@click.option("--count", default=60, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--like", type=click.Path(exists=True, path_type=Path), help="Breaks that another run has drawn.")
@click.option("--out", type=click.Path(path_type=Path), help="Where each break and what it came to is written.")
@click.option("--seconds", default=120.0, show_default=True, help="Tests of one break, by the trace's times.")
@click.option("--tree", default=ROOT, type=click.Path(path_type=Path), help="The checkout.  [default: this one]")
def run(trace_file: Path, count: int, seed: int, like: Path | None, out: Path | None, seconds: float, tree: Path):
    """Apply each break in turn and report whether a test found it."""
    lines = [json.loads(line) for line in trace_file.read_text().splitlines()]
    if like is None:
        drawn: list[Break | None] = list(draw(tree, count, seed))
    else:
        every = [found for file in sorted((tree / "mlx_mtp").rglob("*.py")) for found in breaks_of(file, tree)]
        drawn = [found_again(Break(**each), every) for each in json.loads(like.read_text())]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = tree / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder) / name)
        for i, broken in enumerate(drawn):
            if broken is None:
                click.echo(f"{i}: the line is no more")
                continue
            tests, tic = tests_of(broken, lines, seconds), time.perf_counter()
            red, by = is_red(broken, Path(folder), tests, 300 + 4 * seconds)
            results.append(replace(broken, red=red, by=by))
            took = f"{len(tests)} tests, {time.perf_counter() - tic:.0f} s"
            click.echo(
                f"{i}: {'red' if red else 'GREEN'} {broken.file} {broken.function}: {broken.broken}  ({took}; {by})"
            )
            if out is not None:
                out.write_text(json.dumps([asdict(each) for each in results], indent=1))
    click.echo(f"{sum(each.red for each in results)} of {len(results)} breaks were noticed")


if __name__ == "__main__":
    main()
