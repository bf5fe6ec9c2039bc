"""Our kernels beside stock MLX on a Mac's GPU: are their bits right, and how much faster are they?

    python bench/kernels.py [--op verify_qmm] [--rows 8] [--out FILE]

Shapes are those of released models (`kernels_cases.py`), attention at 2,000 positions; several layers, to keep caches
cold. Those of `verify_qmm_mma` are set beside `verify_qmm`, all others beside stock MLX.
Times are of dependent chains, both sides in turn (`mlx_mtp/trial_run.py`); shown is stock MLX's over the kernel's.
The last line is one JSON object. Off Metal nothing can be timed; `mlx-mtp emulate` counts traffic anywhere.
"""

import json
from pathlib import Path

import click
import mlx.core as mx
from kernels_cases import CASES

from mlx_mtp.bench.result import environment
from mlx_mtp.kernels import on_metal
from mlx_mtp.switch import trials
from mlx_mtp.trial_run import check, time_pair

LAYERS = {"verify_moe": 1}  # of a shape; of the others four, so that caches stay cold


@click.command(help=__doc__)
@click.option("--op", type=click.Choice(sorted({op for op, _ in CASES.values()})), help="Only this kernel.")
@click.option("--rows", type=click.IntRange(1, 8), default=8, help="Most rows M.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON object to this file.")
def main(op: str | None, rows: int, out: Path | None) -> None:
    if not on_metal():
        raise click.ClickException("there is no Metal GPU to time kernels on; `mlx-mtp emulate` counts their traffic")
    found = {}
    for name, (kind, make) in CASES.items():
        if op in (None, kind):
            sites = [make() for _ in range(LAYERS.get(kind, 4))]
            kept = [trial for trial in trials(sites, mx.bfloat16) if trial.rows <= rows]
            found[name] = {trial.rows: {"wrong": check(trial), "ratio": time_pair(trial)} for trial in kept}
            print(f"{kind:<23} {name:<32} " + "  ".join(cell(m, r) for m, r in found[name].items()), flush=True)
    result = json.dumps({**environment(), "kernels": found})
    if out is not None:
        out.write_text(result + "\n")
    print(result)


def cell(m: int, result: dict) -> str:
    return f"M={m} {result['ratio']:.2f}x{' WRONG: ' + result['wrong'] if result['wrong'] else ''}"


if __name__ == "__main__":
    main()
