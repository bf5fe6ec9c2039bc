"""Measure the memory that `mlx-mtp convert` needs on random weights, many times larger than their shards.

    python bench/convert_memory.py [--megabytes 1500] [--shard 50] [--experts 32] [--fp8] [--out FILE]

A GLM-4.5 of small layers with numbered experts is written, converted in 16, 8 and 4 bits by one process each, and
deleted. The table shows MLX's peak, the growth of the process's resident memory after its imports, and the largest
expert stack, which is the minimum that a conversion must hold. The last line is one JSON object with the raw counts.
"""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.result import environment

H, INNER, V = 512, 512, 4096
RESIDENT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
KINDS = {"16 bits": {}, "8 bits": {"quantize": True, "q_bits": 8}, "4 bits": {"quantize": True, "q_bits": 4}}


def config(layers: int, experts: int) -> dict:
    return {
        "model_type": "glm4_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": H,
        "vocab_size": V,
        "intermediate_size": 1024,
        "moe_intermediate_size": INNER,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_bias": False,
        "use_qk_norm": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def shapes(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Return the hub's names; the last layer is the head."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H)}
    for i in range(layers + 1):
        p = f"model.layers.{i}"
        found |= {f"{p}.{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
        found |= {
            f"{p}.self_attn.{n}_proj.weight": (rows, H) for n, rows in (("q", H), ("k", 128), ("v", 128), ("o", H))
        }
        found |= {f"{p}.mlp.gate.weight": (experts, H), f"{p}.mlp.gate.e_score_correction_bias": (experts,)}
        for mlp in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
            found |= {f"{p}.mlp.{mlp}.{n}_proj.weight": (INNER, H) for n in ("gate", "up")}
            found[f"{p}.mlp.{mlp}.down_proj.weight"] = (H, INNER)
    p = f"model.layers.{layers}"
    found |= {f"{p}.{n}.weight": (H,) for n in ("enorm", "hnorm", "shared_head.norm")} | {
        f"{p}.eh_proj.weight": (H, 2 * H)
    }
    return found | {"model.norm.weight": (H,), "lm_head.weight": (V, H)}


def write_checkpoint(path: Path, megabytes: int, shard: int, experts: int, *, fp8: bool) -> tuple[int, int]:
    """Write a checkpoint of this size; return bytes of all tensors, and of the largest expert stack in bfloat16."""
    matrix = H * INNER * (1 if fp8 else 2)
    layers = max(1, megabytes * 10**6 // (3 * experts * matrix) - 1)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config(layers, experts)))
    total, part, number = 0, {}, 0
    for name, shape in shapes(layers, experts).items():
        w = mx.random.normal(shape, mx.bfloat16) if len(shape) > 1 else mx.ones(shape, mx.bfloat16)
        if fp8 and ".experts." in name:
            part |= {name: mx.to_fp8(w), f"{name}_scale_inv": mx.ones((H // 128, INNER // 128))}
        else:
            part[name] = w
        if (size := sum(t.nbytes for t in part.values())) >= shard * 10**6 or name == "lm_head.weight":
            mx.save_safetensors(str(path / f"model-{number:05d}.safetensors"), part, {"format": "pt"})
            total, part, number = total + size, {}, number + 1
    return total, experts * H * INNER * 2


def convert_alone(source: str, kind: str, shard: int) -> None:
    """Convert in this process and print the memory it took."""
    from mlx_mtp.checkpoint.convert import convert

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RESIDENT
    done = convert(source, f"{source}-converted", shard_bytes=shard * 10**6, **KINDS[kind])
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RESIDENT
    print(json.dumps({"mlx_peak": mx.get_peak_memory(), "resident": after - before, "written": done.nbytes}))


@click.command()
@click.option("--megabytes", default=1500, show_default=True, help="Of the checkpoint.")
@click.option("--shard", default=50, show_default=True, help="Megabytes of a file, read and written.")
@click.option("--experts", default=32, show_default=True, help="Of a layer.")
@click.option("--target", "targets", type=click.Choice(list(KINDS)), multiple=True, help="Bits.  [default: all]")
@click.option("--fp8", is_flag=True, help="Experts in 8-bit floats with scales per block.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
@click.option("--alone", nargs=2, hidden=True)
def main(
    megabytes: int,
    shard: int,
    experts: int,
    targets: tuple[str, ...],
    fp8: bool,
    out: Path | None,
    alone: tuple[str, str] | None,
) -> None:
    """Measure the memory of conversions."""
    if alone is not None:
        return convert_alone(*alone, shard)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        total, stack = write_checkpoint(source, megabytes, shard, experts, fp8=fp8)
        for kind in targets or KINDS:
            command = [sys.executable, __file__, "--shard", str(shard), "--alone", str(source), kind]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            found[kind] = json.loads(run.stdout.splitlines()[-1])
            shutil.rmtree(f"{source}-converted")
    table = Table("target", "written", "MLX's peak", "resident memory grew by", "expert stacks in it")
    for kind, counts in found.items():
        sizes = (f"{counts[name] / 1e6:.0f} MB" for name in ("written", "mlx_peak", "resident"))
        table.add_row(kind, *sizes, f"{counts['resident'] / stack:.1f}")
    console = Console(width=110)
    console.print(table)
    files = f"{total / 1e6:.0f} MB in files of {shard} MB, experts of a layer and projection {stack / 1e6:.0f} MB"
    console.print(f"source: {files}{' once they are bfloat16' if fp8 else ''}")
    facts = {"total": total, "stack": stack, "shard": shard * 10**6, "fp8": fp8}
    line = json.dumps({"bench": "convert_memory", "environment": environment(), **facts, "found": found})
    print(line)
    if out is not None:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
