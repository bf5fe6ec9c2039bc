"""Compare the counts stated in kernels/README.md and docs/measurements.md with the current ones, or update them.

    python bench/counts.py [--write]

Launches and bytes of source are those of `python -m bench.launches`. Without --write the exit code is 1 if any place
differs, with a line for each. Numbers of launches in README.md must be among those counted.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from launches import batch, source
from launches.models import MODELS
from launches.steps import CYCLE, MLX_LM, Pair, of_model, with_kernels

ROOT = Path(__file__).parents[1]
KERNELS, MEASURED, README = (ROOT / name for name in ("kernels/README.md", "docs/measurements.md", "README.md"))
ROWS = 4
TEXTS = "texts"  # the key of counts for several sequences with all kernels
Counts = dict[str, dict[str, dict[str, Pair]]]  # by model, implementation, and layer or CYCLE: at one row and at ROWS
STATED = re.compile(r"(?:(\d[\d,]{2,}) (?:to|->|→|instead of) )?(\d[\d,]{2,}) launches")


@dataclass(frozen=True)
class Place:
    """A place in a file that a pattern matches once, and its correct text."""

    file: Path
    pattern: str
    text: str

    def found(self) -> str:
        """Return the current text; ValueError unless the pattern matches once."""
        found = re.findall(self.pattern, self.file.read_text(), re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"{self.file}: {len(found)} places like {self.pattern!r}; expected one")
        return found[0]

    def write(self) -> None:
        text = self.file.read_text()
        self.file.write_text(re.sub(self.pattern, lambda _: self.text, text, flags=re.MULTILINE))


def places(counts: Counts) -> Iterator[Place]:
    """Yield the places that state counts, with the correct text."""
    for name, states in counts.items():
        yield Place(KERNELS, rf"^\| {re.escape(name)} \| .*$", row(name, states))
    experts = [
        (states[MLX_LM][of][0], states["all"][of][1])
        for states in counts.values()
        for of in states["all"]
        if "experts" in of
    ]
    theirs, ours = (f"{min(side)} to {max(side)}" for side in zip(*experts, strict=True))
    gain = f"a layer with experts is {theirs} launches in mlx-lm and {ours} with the kernels"
    yield Place(
        KERNELS, r"a layer with experts is \d+ to \d+ launches in mlx-lm and \d+ to \d+ with the kernels", gain
    )
    step, cycle = counts["Step-3.5-Flash"], CYCLE
    more = f"{gain}; a cycle of Step-3.5-Flash at k = 3 {step['none'][cycle][1]} and {step['all'][cycle][1]}"
    yield Place(MEASURED, r"a layer with experts is \d+ .* a cycle of Step-3.5-Flash at k = 3 \d+ and \d+", more)
    sizes = [megabytes(name) for name in ("Step-3.5-Flash", "GLM-4.5")]
    sources = "{:.1f} MB in a cycle of Step-3.5-Flash at k = 3, {:.1f} MB in one of GLM-4.5".format(*sizes)
    yield Place(KERNELS, r"[\d.]+ MB in a cycle of Step-3.5-Flash at k = 3, [\d.]+ MB in one of GLM-4.5", sources)


def row(name: str, states: dict[str, dict[str, Pair]]) -> str:
    """Return a model's row of the table: mlx-lm at one row or our loop with its modules, then with the kernels."""
    theirs, stock, ours = (states[on] for on in (MLX_LM, "none", "all"))
    shown = "; ".join(f"{of} {theirs[of][0]}, {ours[of][1]}" for of in theirs if of != CYCLE)
    cycles = f"{stock[CYCLE][1]}, {ours[CYCLE][1]} | {states[TEXTS][CYCLE][1]}"
    return f"| {name} | {shown} | {theirs[CYCLE][0]}, {ours[CYCLE][0]} | {cycles} |"


def of_texts(name: str, one: int) -> Pair:
    """Return the launches `one` of a sequence's cycle and those of several; ValueError if they are too many."""
    found = batch.of_texts(with_kernels(name)).total()
    if found > batch.MOST * one:
        raise ValueError(f"{name}: {found} launches for several sequences, {one} for one")
    return one, found


def megabytes(name: str) -> float:
    """Return the MB of source that the launches of a cycle with three drafts carry."""
    return sum(launch.ours for launch in source.launches(source.texts(with_kernels(name), ROWS))) / 1e6


def unknown(counts: Counts) -> Iterator[str]:
    """Yield the numbers of launches in README.md that were not counted."""
    known = {n for states in counts.values() for of in states.values() for pair in of.values() for n in pair}
    for match in STATED.finditer(README.read_text()):
        if not {int(n.replace(",", "")) for n in match.groups() if n} <= known:
            yield f"README.md: {match[0]!r} is stated, but was not counted"


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Write the current counts.")
def main(write: bool) -> None:
    counts = {name: of_model(name, ROWS) for name in MODELS}
    for name, states in counts.items():
        states[TEXTS] = {CYCLE: of_texts(name, states["all"][CYCLE][1])}
    wrong = list(unknown(counts))
    for place in places(counts):
        if (stated := place.found()) != place.text:
            if write:
                place.write()
            else:
                wrong.append(f"{place.file.relative_to(ROOT)}: {stated!r} stated, {place.text!r} counted")
    for line in wrong:
        click.echo(line)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
