"""Count the tokens per cycle of the demo's block drafter after pauses, by the rows that it reads when it resumes.

    python bench/pauses.py [--pauses 16,64,256,1024] [--cycles 12] [--prompts 8]

Each answer pauses drafting after its first cycles, for a number of plain tokens, and then drafts for some cycles,
which are counted. "all": the drafter reads rows during the pause, at most 64 wait (as in a generation); "last N": the
last N rows are kept, and its caches start with them. The last line is one JSON object.
"""

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import click

import mlx_mtp
from mlx_mtp.demo import demo_block_path, demo_path
from mlx_mtp.tuning.plan import PLAIN, Plan

KEPT = (None, 32, 8)  # rows kept for the drafter; None: it reads all during the pause


class Pausing:
    """A control that drafts for two cycles, pauses for a number of tokens and then drafts again."""

    paused = ""

    def __init__(self, k: int, pause: int):
        self.plans = itertools.chain([Plan("block", k)] * 2, [PLAIN] * pause, itertools.repeat(Plan("block", k)))
        self.counted: list[int] = []
        self.resumed = False

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        return next(self.plans)

    def observe(self, cycle: Any) -> None:
        self.resumed = self.resumed or not cycle.plan.k
        if self.resumed and cycle.plan.k:
            self.counted.append(int(cycle.accepted) + 1)


def counted(model: Any, prompt: list[int], pause: int, cycles: int, kept: int | None) -> tuple[list[int], int]:
    """Return the tokens of each cycle after a pause, and the most bytes of rows that waited for the drafter."""
    control = Pausing(model.max_draft_tokens, pause)
    with mock.patch.object(type(model.drafter), "absorbs", kept is None):
        cache = mlx_mtp.make_prompt_cache(model)
        cache.reach = kept
        with mock.patch("mlx_mtp.generate.control_for", return_value=control):
            waiting, steps = 0, mlx_mtp.generate_step(prompt, model, max_tokens=-1, prompt_cache=cache)
            for _ in steps:
                waiting = max(waiting, sum(rows.nbytes for rows in cache.backlog))
                if len(control.counted) >= cycles:
                    break
            steps.close()
    return control.counted[:cycles], waiting


@click.command(help=__doc__)
@click.option("--pauses", default="16,64,256,1024", show_default=True)
@click.option("--cycles", default=12, show_default=True, help="Counted cycles after a pause.")
@click.option("--prompts", default=8, show_default=True)
def main(pauses: str, cycles: int, prompts: int) -> None:
    model, tokenizer = mlx_mtp.load(demo_path(), draft_model=demo_block_path(), mtp=False)
    kinds = json.loads(Path(__file__).with_name("prompts.json").read_text()).values()
    texts = [entry for row in itertools.zip_longest(*kinds) for entry in row if isinstance(entry, str)][:prompts]
    found: dict[str, dict[str, list[float]]] = {}
    for pause in map(int, pauses.split(",")):
        for kept in KEPT:
            each = [counted(model, tokenizer.encode(text), pause, cycles, kept) for text in texts]
            tokens = [count for counts, _ in each for count in counts]
            name = "all" if kept is None else f"last {kept}"
            found.setdefault(str(pause), {})[name] = [sum(tokens) / len(tokens), max(most for _, most in each)]
            print(
                f"pause {pause:5}, {name:7}: {found[str(pause)][name][0]:.2f} tokens per cycle, "
                f"at most {found[str(pause)][name][1] / 1024:.0f} KB of rows"
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
