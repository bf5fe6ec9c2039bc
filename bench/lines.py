"""Print the lines of code of each room of the package; fail where they exceed the budget of `lines.csv`.

    python bench/lines.py [--write]

Blank lines, comments and docstrings do not count. A room is a directory of mlx_mtp/; files next to them are the room
"hall". A change that needs more lines raises its room's number in the same commit, with the reason in the message:
--write stores today's numbers.
"""

import ast
import csv
import io
import tokenize
from collections import Counter
from pathlib import Path

import click

PACKAGE = Path(__file__).parents[1] / "mlx_mtp"
BUDGET = Path(__file__).with_name("lines.csv")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    """Return the number of lines with code in the text of a Python file."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NO_CODE]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, documented) and ast.get_docstring(n) is not None]
    return len(code - {line for n in nodes for line in range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1)})


def by_room(package: Path = PACKAGE) -> Counter[str]:
    """Return the lines of code of a package by room."""
    found: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        room, *inner = file.relative_to(package).parts
        found[room if inner else "hall"] += code_lines(file.read_text())
    return found


def budget(file: Path = BUDGET) -> dict[str, int]:
    """Return the maximum lines of code by room."""
    with file.open(newline="") as rows:
        return {row["room"]: int(row["lines"]) for row in csv.DictReader(rows)}


def excess(lines: Counter[str], most: dict[str, int]) -> list[str]:
    """Return one line for each room that has more lines than its budget, or no budget."""
    return [
        f"{room}: {n} lines of code; its budget is {most.get(room, 0)}"
        for room, n in sorted(lines.items())
        if n > most.get(room, 0)
    ]


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Store today's numbers as the budget.")
def main(write: bool) -> None:
    lines = by_room()
    if write:
        BUDGET.write_text("room,lines\n" + "".join(f"{room},{n}\n" for room, n in sorted(lines.items())))
    most = budget()
    for room, n in sorted(lines.items()):
        print(f"{room:12} {n:6,} of {most.get(room, 0):6,}")
    print(f"{'all':12} {lines.total():6,} of {sum(most.values()):6,}")
    if too_many := excess(lines, most):
        raise click.ClickException("; ".join(too_many))


if __name__ == "__main__":
    main()
