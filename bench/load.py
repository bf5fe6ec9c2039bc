"""Measure what loading a checkpoint costs beside mlx_lm: time, memory, and bytes read from its files.

    python bench/load.py [--family step3p5] [--megabytes 2000] [--runs 3] [--out FILE]

Random bfloat16 weights of a small shape are written, loaded in turn by fresh processes, and deleted. The last line is
one JSON object with every run.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.random_model import shaped_model
from mlx_mtp.bench.result import environment
from mlx_mtp.checkpoint import convert_writer as writer
from mlx_mtp.checkpoint.parameters import named

SHARD = 500 << 20
RESIDENT = 1 if sys.platform == "darwin" else 1024  # bytes of a unit of ru_maxrss
WAYS = ("mlx_lm", "ours, mtp=False", "ours", "ours, first answer")
COMMON = {"hidden_size": 1024, "vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
COMMON |= {"num_attention_heads": 16, "head_dim": 64, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
CONFIGS = {
    "step3p5": COMMON
    | {"num_attention_groups": 2, "intermediate_size": 4096, "moe_num_experts": 24, "moe_top_k": 4}
    | {"moe_intermediate_size": 1024, "share_expert_dim": 1024, "num_nextn_predict_layers": 3}
    | {"layer_types": ["full_attention", "sliding_attention"] * 500, "attention_other_setting": None},
    "mimo": COMMON
    | {"num_key_value_heads": 4, "intermediate_size": 8192, "rope_theta": 1e4, "num_nextn_predict_layers": 1},
}


def write_checkpoint(path: Path, family: str, megabytes: int) -> int:
    """Write about that many megabytes of random weights, heads among the shards; returns the number of bytes."""
    sizes = [_write(path, family, layers) for layers in (2, 3)]
    return _write(path, family, max(3, 2 + (megabytes * 10**6 - sizes[0]) // (sizes[1] - sizes[0])), data=True)


def _write(path: Path, family: str, layers: int, *, data: bool = False) -> int:
    config = CONFIGS[family] | {"model_type": family, "num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps(config))
    model, _ = shaped_model(path / "config.json", bits=16)
    names = {n: model.spec.name(int(n[4]), n[6:], layers) if n.startswith("mtp.") else n for n in named(model)}
    tensors = {names[n]: mx.zeros(w.shape, mx.bfloat16) for n, w in named(model).items()}
    total, drawn = sum(w.nbytes for w in tensors.values()), {}
    for file, part in writer.shards(tensors, SHARD).items() if data else ():
        drawn = {n: mx.random.normal(w.shape, mx.bfloat16) / 32 if w.ndim > 1 else w + 1 for n, w in part.items()}
        writer.write(path / file, drawn, {"format": "mlx"}, lambda name, w: mx.eval(w))
    return total


def load_alone(path: str, way: str) -> None:
    """In a process of its own: load, and print what that took."""
    import mlx_lm.utils

    import mlx_mtp

    read, cpu, began = _bytes_read(), time.process_time(), time.perf_counter()
    if way == "mlx_lm":
        mlx_lm.utils.load_model(Path(path))
    else:
        model = mlx_mtp.load_model(path, mtp=way != "ours, mtp=False")
        if way == "ours, first answer":
            list(mlx_mtp.generate_step([1, 2, 3], model, max_tokens=2))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RESIDENT
    sizes = {"resident": resident, "mlx_peak": mx.get_peak_memory(), "read": _bytes_read() - read}
    print(json.dumps({"seconds": seconds, "cpu": cpu, **sizes}))


def _bytes_read() -> int:
    """Count the bytes that this process has read from files; 0 where the system does not say."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[1]) if counts.exists() else 0


@click.command()
@click.option("--family", type=click.Choice(list(CONFIGS)), default="step3p5", show_default=True)
@click.option("--megabytes", default=2000, show_default=True, help="Of the checkpoint.")
@click.option("--runs", default=3, show_default=True, help="Of each way to load, in turn.")
@click.option("--way", "ways", type=click.Choice(WAYS), multiple=True, help="To load.  [default: all]")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
@click.option("--alone", nargs=2, hidden=True)
def main(
    family: str, megabytes: int, runs: int, ways: tuple[str, ...], out: Path | None, alone: tuple[str, str] | None
) -> None:
    """Time and memory that loading takes, beside mlx_lm."""
    if alone is not None:
        return load_alone(*alone)
    ways = ways or WAYS
    found: dict[str, list[dict]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), family, megabytes)
        for _ in range(runs):
            for way in ways:
                command = [sys.executable, __file__, "--alone", folder, way]
                run = subprocess.run(command, check=True, capture_output=True, text=True)
                found[way].append(json.loads(run.stdout.splitlines()[-1]))
    table = Table(f"{family}, {size / 1e9:.2f} GB", "seconds", "CPU seconds", "resident", "MLX's peak", "read")
    for way, results in found.items():
        middle = {name: median(result[name] for result in results) for name in results[0]}
        sizes = (f"{middle[name] / 1e9:.2f} GB" for name in ("resident", "mlx_peak", "read"))
        table.add_row(way, f"{middle['seconds']:.1f}", f"{middle['cpu']:.1f}", *sizes)
    Console(width=110).print(table)
    line = json.dumps({"bench": "load", "environment": environment(), "family": family, "size": size, "runs": found})
    print(line)
    if out is not None:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
