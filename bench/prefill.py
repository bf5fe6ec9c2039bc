"""What the heads add to prefill: reading a prompt with all heads kept up to date, against without heads.

    python bench/prefill.py [--model DIR] [--runs 9]

Both sides in turn for each length, mlx-lm's prefill of the same trunk beside them. The last line is one JSON object.
"""

import json
import statistics
import time
from pathlib import Path

import click
import mlx.core as mx
from decode import environment, plain_mlx_lm
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.demo import demo_path


def ours(model, prompt: list[int], k: int | None) -> float:
    tic = time.perf_counter()
    for _ in mlx_mtp.generate_step(prompt, model, max_tokens=0, num_draft_tokens=k):
        pass
    mx.synchronize()
    return time.perf_counter() - tic


def theirs(model, prompt: list[int]) -> float:
    """mlx-lm's forward over the whole prompt, logits of the last row only."""
    tic = time.perf_counter()
    cache = model.make_cache()
    mx.eval(model.lm_head(model.model(mx.array(prompt)[None], cache)[:, -1:]))
    return time.perf_counter() - tic


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--runs", default=9, show_default=True)
@click.option("--lengths", default="32,128,512,2048", show_default=True)
def main(model: str, runs: int, lengths: str) -> None:
    """Time the prefill with and without heads."""
    loaded, _ = mlx_mtp.load(model)
    plain = plain_mlx_lm(Path(model), loaded.report().expanded)
    table = Table("prompt", "without heads", "with heads", "with / without", "mlx-lm / without")
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
        times = [{name: side() for name, side in sides.items()} for _ in range(runs)]
        seconds[n] = times
        median = {name: statistics.median(t[name] for t in times) for name in sides}
        ratio = {
            name: statistics.median(t[name] / t["without"] for t in times) for name in sides if name != "without"
        }
        table.add_row(
            f"{n} tokens",
            f"{median['without'] * 1e3:.1f} ms",
            f"{median['with'] * 1e3:.1f} ms",
            f"{ratio['with']:.2f}x",
            f"{ratio['mlx-lm']:.2f}x",
        )
    Console(width=110).print(table)
    print(json.dumps({"environment": environment(), "seconds": seconds}))


if __name__ == "__main__":
    main()
