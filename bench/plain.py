"""Time plain decoding and the default flags against mlx-lm's loop, and that loop against itself.

    python bench/plain.py [--model DIR] [--contexts 500,8000] [--rounds 24] [--max-tokens 100]

All loops prefill the same text except its last token and continue from there, in a different order in each round. A
speed is the number of tokens over the time from that last token on, because mlx-lm yields a token when the next one
is nearly computed. A ratio compares two turns of one round. Shown are the median of a loop's ratios with its 95%
interval, from a seeded bootstrap over the rounds, and the quartiles. Ours is as fast as mlx-lm's if its median is at
least 1, or within the quartiles of the second turn of mlx-lm's loop. A model with too few positions is given more:
its text is then worthless, but not slower. The last line is one JSON object, with the ratios and all seconds.
"""

import copy
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
import mlx.core as mx
from decode import HERE
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench.decode import Loop, LoopSettings, MlxLm, Ours, PrefilledLoop, twin
from mlx_mtp.bench.result import environment
from mlx_mtp.bench.subject import reset_costs
from mlx_mtp.demo import demo_path

WARMUPS = 3
DRAWS = 2000  # of the bootstrap


def with_positions(path: Path, positions: int, to: Path) -> Path:
    """Copy a checkpoint to a directory, with at least `positions` positions in its config."""
    shutil.copytree(path, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    (to / "config.json").write_text(json.dumps(config))
    return to


def text_of(tokenizer, tokens: int) -> list[int]:
    """Return this number of tokens from the benchmark's prompts, repeated."""
    entries = [entry for of_kind in json.loads((HERE / "prompts.json").read_text()).values() for entry in of_kind]
    text = tokenizer.encode(" ".join(entry for entry in entries if isinstance(entry, str)))
    return (text * (tokens // len(text) + 1))[:tokens]


def measure(loops: list[Loop], prompt: list[int], settings: LoopSettings, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each loop by round."""
    readers, order = {loop.name: PrefilledLoop(loop, prompt, settings).read() for loop in loops}, random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for round_ in range(-WARMUPS, rounds):
        for name in order.sample(list(readers), len(readers)):
            took = turn(readers[name])
            if round_ >= 0:
                seconds[name].append(took)
    return seconds


def turn(reader: PrefilledLoop) -> float:
    """Generate once and return the seconds."""
    loop, settings = reader.loop, reader.settings
    cache = copy.deepcopy(reader.cache, {id(loop.model): loop.model})
    mx.synchronize()
    tic = time.perf_counter()
    tokens = list(loop.tokens(reader.prompt[-1:], cache, settings.max_tokens, settings))
    seconds = time.perf_counter() - tic
    assert len(tokens) == settings.max_tokens, loop.name
    mx.synchronize()
    return seconds


class Ratio(NamedTuple):
    """A loop's speed relative to the first loop's, over all rounds.

    interval: of the median, 95%, by a bootstrap. quartiles: the lower and the upper one.
    """

    median: float
    interval: tuple[float, float]
    quartiles: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.median:.3f}x [{low:.3f}, {high:.3f}] ({self.quartiles[0]:.2f} to {self.quartiles[1]:.2f})"


def ratios(seconds: dict[str, list[float]]) -> dict[str, Ratio]:
    """Return the `Ratio` of each loop but the first. seconds: of each loop by round."""
    first, *others = seconds
    pairs = {name: [a / b for a, b in zip(seconds[first], seconds[name], strict=True)] for name in others}
    return {name: ratio_of(values) for name, values in pairs.items()}


def ratio_of(values: list[float]) -> Ratio:
    """Return the `Ratio` of the quotients of all rounds, at least two; the same for the same values."""
    low, median, high = statistics.quantiles(values, n=4)
    rng = random.Random(0)
    drawn = [statistics.median(rng.choices(values, k=len(values))) for _ in range(DRAWS)]
    cuts = statistics.quantiles(drawn, n=40)  # at 2.5%, 5%, ... 97.5%
    return Ratio(median, (cuts[0], cuts[-1]), (low, high))


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--contexts", default="500,8000", show_default=True, help="Tokens that the prompts have.")
@click.option("--rounds", default=24, show_default=True, type=click.IntRange(2))
@click.option("--max-tokens", default=100, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(model: str, contexts: str, rounds: int, max_tokens: int, out: Path | None) -> None:
    """Compare plain and default decoding with mlx-lm's loop, and that loop with itself."""
    lengths, found, compared = [int(context) for context in contexts.split(",")], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        ours, tokenizer = mlx_mtp.load(with_positions(Path(model), max(lengths) + max_tokens, Path(folder)))
    reset_costs(ours)
    theirs = twin(ours)
    loops = [MlxLm(theirs), MlxLm(theirs, "mlx-lm again"), Ours(ours, "plain", 0), Ours(ours, "default flags", None)]
    table = Table(
        "context",
        *(loop.name for loop in loops[1:]),
        title="tokens/s over mlx-lm's loop: median [95% interval] (quartiles)",
    )
    for context in lengths:
        found[context] = measure(loops, text_of(tokenizer, context), LoopSettings(max_tokens), rounds)
        compared[context] = ratios(found[context])
        table.add_row(str(context), *map(str, compared[context].values()))
    Console(width=130).print(table)
    each = {context: {name: ratio._asdict() for name, ratio in row.items()} for context, row in compared.items()}
    line = json.dumps({"environment": environment(), "model": Path(model).name, "ratios": each, "seconds": found})
    print(line)
    if out:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
