"""Convert a head that `python -m bench.smollm2_head` has trained to a file that `load` accepts.

    python -m bench.smollm2_head.convert --run DIR --out mtp.safetensors

The head is quantized to 8 bits, in the target's type. Without --model the target is that of `mlx-mtp pull smollm2`.
"""

from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

import mlx_mtp
from mlx_mtp.checkpoint.pull import smollm2
from mlx_mtp.checkpoint.tuned import write_heads
from mlx_mtp.training import heads

BITS = 8


@click.command()
@click.option("--run", type=click.Path(exists=True, path_type=Path), required=True, help="Directory of the results.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option("--model", help="Checkpoint of the target.")
def main(run: Path, out: Path, model: str | None) -> None:
    """Write a trained head to a *.safetensors file."""
    target, _ = mlx_mtp.load(model or str(smollm2()), kernels="off", mtp=False)
    click.echo(f"{out}: {write_head(target, run, out):,} bytes")


def write_head(target, run: Path, out: Path) -> int:
    """Write the head in the directory `run` for a loaded target; return the file's size in bytes.

    AssertionError if the head's parameters are not those of a new head of the target.
    """
    vocabulary = np.load(run / "vocab.npy").tolist()
    workshop = heads.new(
        target, vocabulary, depths=1, bits=BITS, dtype=mx.float32
    )  # `depths` matters in training only
    trained = {f"mtp.0.{name}": mx.array(w.astype(np.float32)) for name, w in np.load(run / "head.npz").items()}
    shapes = {name: w.shape for name, w in dict(tree_flatten(workshop.trained.trainable_parameters())).items()}
    assert {name: w.shape for name, w in trained.items()} == shapes
    workshop.trained.update(tree_unflatten(list(trained.items())))
    target.mtp = workshop.finished()
    return write_heads(target, out, {})


if __name__ == "__main__":
    main()
