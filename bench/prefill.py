"""Time what the heads add to prefill: until the first token, and the second, with heads and without.

    python bench/prefill.py [--model DIR] [--runs 9]

Heads with a window read the end of the prompt once the first token is out, so their cost lies before the second. Both
sides in turn for each length, mlx-lm's forward over the same prompt beside them. The last line is one JSON object.
"""

import json
import statistics
import time

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench.decode import twin
from mlx_mtp.bench.result import environment
from mlx_mtp.demo import demo_path


def ours(model, prompt: list[int], k: int | None) -> tuple[float, float]:
    """Seconds to the first and to the second token."""
    tic = time.perf_counter()
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=20, num_draft_tokens=k, adaptive=False)
    times = [time.perf_counter() - tic for _, _ in zip(range(2), steps, strict=False)]
    steps.close()
    return times[0], times[1]


def theirs(model, prompt: list[int]) -> tuple[float, float]:
    """mlx-lm's forward over the whole prompt, logits of the last row only."""
    tic = time.perf_counter()
    cache = model.make_cache()
    mx.eval(model.lm_head(model.model(mx.array(prompt)[None], cache)[:, -1:]))
    elapsed = time.perf_counter() - tic
    return elapsed, elapsed


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--runs", default=9, show_default=True)
@click.option("--lengths", default="32,128,512,2048", show_default=True)
def main(model: str, runs: int, lengths: str) -> None:
    """Time the prefill with and without heads."""
    loaded, _ = mlx_mtp.load(model)
    plain = twin(loaded)
    table = Table("prompt", "first token", "with heads", "second token", "with heads", "mlx-lm's prefill")
    seconds: dict = {}
    for n in map(int, lengths.split(",")):
        prompt = [(7 * i) % 500 + 20 for i in range(n)]
        sides = {
            "without": lambda prompt=prompt: ours(loaded, prompt, 0),
            "with": lambda prompt=prompt: ours(loaded, prompt, None),
            "mlx-lm": lambda prompt=prompt: theirs(plain, prompt),
        }
        for side in sides.values():
            side()
        times = seconds[n] = [{name: side() for name, side in sides.items()} for _ in range(runs)]
        row = [f"{n} tokens"]
        for token in (0, 1):
            row.append(f"{statistics.median(t['without'][token] for t in times) * 1e3:.1f} ms")
            row.append(f"{statistics.median(t['with'][token] / t['without'][token] for t in times):.2f}x")
        row.append(f"{statistics.median(t['mlx-lm'][0] / t['without'][0] for t in times):.2f}x")
        table.add_row(*row)
    Console(width=110).print(table)
    print(json.dumps({"environment": environment(), "seconds": seconds}))


if __name__ == "__main__":
    main()
