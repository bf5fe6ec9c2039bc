"""Compare the controller with plain decoding and the best fixed draft length, in the simulator of the tests.

    python bench/controller.py [--seeds 20] [--scenarios 40] [--sample 1]

Scenarios are drawn from all cost tables, traces, drifts and wrong starting costs of tests/support/simulator.py.
Ratios are of tokens per second over all seeds together; "worst" is one run. In a third of the scenarios the machine
pauses for half a second in the middle of the text. A second table is of consecutive short answers, each with the
costs measured in the previous ones; the first answer does not count. A third table is the same on a two-core machine
shared with other processes: slow periods, heavy tails, and heads that must prefill a prompt. A fourth one is of a
drafter with several choices, on the costs of rows in LANES: plain decoding, every fixed chain of up to 7 drafts and
every fixed tree are compared. No model runs. The last line is one JSON object.
"""

import itertools
import json
import random
import statistics
import sys
from functools import partial
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from simulator import (
    DRIFTS,
    HEADS,
    LANES,
    TABLES,
    WRONG,
    Comparison,
    Machine,
    compare,
    known_costs,
    lattice,
    replay,
    text,
    trace,
)

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.plan import TREES, Fixed

LENGTHS = (8, 20, 50, 100)  # tokens of short answers
ANSWERING = ("reference BLAS", "OpenBLAS", "Nemotron", "M3 Ultra GLM-5.2")
LENGTHS_IF_BUSY = (20, 100, 250)
ANSWERS = 800  # minimum tokens of all consecutive answers of one length
TRACES = [*HEADS, "useless|perfect", "perfect|useless", "typical|poor", "poor|typical", "bursts"]


def scenario(draw: random.Random) -> dict:
    """One combination of all conditions."""
    return {
        "table": draw.choice(list(TABLES)),
        "heads": draw.choice(TRACES),
        "draft": draw.choice([0.03, 0.08, 0.2]),
        "most": draw.choice([1, 2, 3, 7, 15]),
        "tokens": draw.choice([200, 400, 400, 2000]),
        "drift": draw.choice(list(DRIFTS)),
        "known": draw.choice([None, *WRONG]),
        "missing": draw.choice([0.0, 0.0, 0.33]),
        "row": draw.choice([0.003, 0.01, 0.02]),
        "pause": draw.choice([0.0, 0.0, 0.5]),
    }


def measure(s: dict, seeds: int):
    """Compare on `seeds` texts."""
    machine = Machine(
        TABLES[s["table"]],
        depth=s["draft"],
        row=s["row"],
        noise=0.2,
        drift=DRIFTS[s["drift"]],
        missing=s["missing"],
        pause=(40, s["pause"] / Machine.second),
    )

    def make() -> Controller:
        known = known_costs(machine, s["most"], s["known"]) if s["known"] else None
        return Controller(max_drafts=s["most"], known=known)

    return compare(machine, trace(s["heads"], s["tokens"]), make, s["most"], s["tokens"], range(seeds))


def answers(machine: Machine, heads: str, length: int, seeds: int) -> tuple[float, float]:
    """Compare consecutive answers, from the second on, with plain decoding and with the best fixed k."""
    most, count = 3, max(10, ANSWERS // length)
    steps = np.zeros(most + 2)
    for seed in range(seeds):
        known = None
        for i in range(count):
            words, drawn = text(trace(heads, length), seed * count + i), seed * count + i
            control = Controller(max_drafts=most, known=known)
            contenders = [control, *(Fixed(k) for k in range(most + 1))]
            took = [replay(machine, words, contender, length, drawn).steps for contender in contenders]
            known = control.costs
            steps += np.array(took) * (i > 0)
    return float(steps[1] / steps[0]), float(steps[1:].min() / steps[0])


def busy_machine(table: str, row: float) -> Machine:
    """Return the recorded machine: two cores shared with other processes."""
    return Machine(TABLES[table], depth=0.2, row=row, noise=0.1, resume=0.4, prompt=30, begin=1.5, busy=True)


def print_answers(
    title: str, machines: dict[str, Machine], kinds: tuple[str, ...], lengths: tuple[int, ...], seeds: int
) -> list[tuple[float, float]]:
    """Print the ratios of consecutive answers; return all of them, to plain and to the best fixed k."""
    table = Table("table", "heads", *(f"{n} tokens" for n in lengths), title=f"{title}: to plain, to best k")
    every = []
    for name, machine in machines.items():
        for heads in kinds:
            ratios = [answers(machine, heads, n, seeds) for n in lengths]
            table.add_row(name, heads, *(f"{plain:.3f} {best:.3f}" for plain, best in ratios))
            every += ratios
    Console(width=180).print(table)
    return every


def print_trees(seeds: int) -> list[Comparison]:
    """Print how the controller compares with fixed chains and trees on each lane; return all comparisons."""
    table = Table("lane", "heads", "states", "best", "to plain", "to best chain", "to best", "worst", title="trees")
    every = []
    for lane in LANES:
        for heads, stated in itertools.product(("useless", "half", "typical", "decaying"), (1.0, 2.5)):

            def make() -> Controller:
                return Controller(max_drafts=7, trees={"heads": TREES[-1]})

            how = TREES, partial(lattice, stated=stated)
            found = compare(Machine(LANES[lane], noise=0.1), trace(heads, 600), make, 7, 600, range(seeds), *how)
            ratios = (found.plain, found.chain, found.best, found.worst_best)
            best = f"{'tree' if found.tree else 'chain'} of {found.k}"
            table.add_row(lane, heads, str(stated), best, *(f"{x:.3f}" for x in ratios))
            every.append(found)
    Console(width=180).print(table)
    return every


@click.command()
@click.option("--seeds", default=20, show_default=True, help="Texts per scenario.")
@click.option("--scenarios", default=40, show_default=True)
@click.option("--sample", default=1, show_default=True, help="Which scenarios are drawn.")
def main(seeds: int, scenarios: int, sample: int) -> None:
    """Compare the controller with every fixed draft length."""
    draw = random.Random(sample)
    rows = [(s, measure(s, seeds)) for s in (scenario(draw) for _ in range(scenarios))]
    rows.sort(key=lambda row: row[1].best)
    names = ("table", "heads", "draft", "most", "tokens", "drift", "known", "missing")
    table = Table(*names, "best k", "to plain", "worst", "to best k", "worst", title="tokens per second, ratio")
    for s, r in rows:
        ratios = (r.plain, r.worst_plain, r.best, r.worst_best)
        table.add_row(*(str(s[name]) for name in names), str(r.k), *(f"{x:.3f}" for x in ratios))
    Console(width=180).print(table)
    few, heads = max(1, seeds // 5), ("useless", "poor", "typical", "good")
    calm = {name: Machine(TABLES[name], noise=0.2) for name in ANSWERING}
    pairs = print_answers("answers in a row", calm, heads, LENGTHS, few)
    busy = {name: busy_machine(name, row) for name, row in (("reference BLAS", 0.05), ("OpenBLAS", 0.015))}
    busy_pairs = print_answers("consecutive answers on a shared machine", busy, heads, LENGTHS_IF_BUSY, few)
    trees = print_trees(few)
    best = [r.best for _, r in rows]
    summary = {
        "scenarios": len(rows),
        "seeds": seeds,
        "sample": sample,
        "plain_at_least_0.97": sum(r.plain >= 0.97 for _, r in rows),
        "best_at_least_0.95": sum(x >= 0.95 for x in best),
        "plain_min": round(min(r.plain for _, r in rows), 4),
        "best_min": round(min(best), 4),
        "best_median": round(statistics.median(best), 4),
        "best_mean": round(sum(best) / len(best), 4),
        "answers_plain_min": round(min(plain for plain, _ in pairs), 4),
        "answers_best_median": round(statistics.median(best for _, best in pairs), 4),
        "busy_plain_min": round(min(plain for plain, _ in busy_pairs), 4),
        "busy_best_median": round(statistics.median(best for _, best in busy_pairs), 4),
        "busy_best_min": round(min(best for _, best in busy_pairs), 4),
        "trees_plain_min": round(min(r.plain for r in trees), 4),
        "trees_chain_min": round(min(r.chain for r in trees), 4),
        "trees_best_min": round(min(r.best for r in trees), 4),
        "trees_best_median": round(statistics.median(r.best for r in trees), 4),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
