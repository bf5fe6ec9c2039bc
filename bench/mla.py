"""Time multi-head latent attention on M rows: our layer, absorbed for each M, and mlx-lm's, for one row only.

    python bench/mla.py [--heads 16] [--lengths 1024,4096,8192] [--runs 7] [--out FILE]

DeepSeek-V3's sizes but for the number of heads (its 128 take minutes on a CPU), float32, random weights, a cache that
holds `length` rows. `attention` is our layer less the projections of the hidden state, which no attention can change.
Every run takes all sides and all M in turn. Shown are medians: T(M) over T(1) of the same side, and what one row more
adds, in units of one row. The last line is one JSON object with every raw time.
"""

import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import click
import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention
from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.result import environment
from mlx_mtp.cache.growing import LinearKVCache
from mlx_mtp.models.deepseek_v3 import Attention, ModelArgs

ROWS = range(1, 9)


def sizes(heads: int) -> ModelArgs:
    return ModelArgs(
        hidden_size=7168,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_theta=10000.0,
    )


def ours(layer: Attention, x: mx.array, latent: mx.array, k_pe: mx.array) -> Callable[[], mx.array]:
    """A verify of x's rows: the offset is an array, so that the mask is one too."""
    cache, length = LinearKVCache(), latent.shape[2]
    cache.reserve(length + len(ROWS))
    cache.update_and_fetch(latent, k_pe)
    mx.eval(cache.parts)

    def run() -> mx.array:
        cache.seek(mx.array([length]), length)
        return layer(x, cache.make_mask(x.shape[1], return_array=True), cache)

    return run


def attention(layer: Attention, m: int, latent: mx.array, k_pe: mx.array) -> Callable[[], mx.array]:
    q_nope = mx.random.normal((1, layer.num_heads, m, layer.qk_nope_head_dim))
    q_pe = mx.random.normal((1, layer.num_heads, m, layer.qk_rope_head_dim))
    mask = create_causal_mask(m, latent.shape[2] - m)
    mx.eval(q_nope, q_pe, mask)
    return lambda: layer.unembed_out(layer.attend(layer.embed_q(q_nope), q_pe, latent, latent, k_pe, mask))


def theirs(layer: DeepseekV3Attention, x: mx.array, latent: mx.array, k_pe: mx.array) -> Callable[[], mx.array]:
    cache, length = KVCache(), latent.shape[2]
    cache.update_and_fetch(latent, k_pe)
    mx.eval(cache.state)

    def run() -> mx.array:
        cache.offset = length
        mask = create_causal_mask(x.shape[1], length) if x.shape[1] > 1 else None
        return layer(x, mask, cache)

    return run


def seconds(run: Callable[[], mx.array]) -> float:
    tic = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - tic


def measure(heads: int, length: int, runs: int) -> dict[str, list[list[float]]]:
    """Seconds by side, run and number of rows."""
    args = sizes(heads)
    layer, plain = Attention(args), DeepseekV3Attention(args)
    plain.update(layer.parameters())
    latent, k_pe = mx.random.normal((1, 1, length, 512)), mx.random.normal((1, 1, length, 64))
    rows = [mx.random.normal((1, m, args.hidden_size)) for m in ROWS]
    mx.eval(layer.parameters(), latent, k_pe, rows)
    sides = {
        "attention": [attention(layer, m, latent, k_pe) for m in ROWS],
        "layer": [ours(layer, x, latent, k_pe) for x in rows],
        "mlx-lm": [theirs(plain, x, latent, k_pe) for x in rows],
    }
    for mine, other in zip(sides["layer"], sides["mlx-lm"], strict=True):  # also the warm-up
        assert mx.allclose(mine(), other(), atol=1e-4, rtol=1e-3), "the two sides differ"
    times = [{name: [seconds(run) for run in side] for name, side in sides.items()} for _ in range(runs)]
    return {name: [run[name] for run in times] for name in sides}


@click.command()
@click.option("--heads", default=16, show_default=True)
@click.option("--lengths", default="1024,4096,8192", show_default=True)
@click.option("--runs", default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(heads: int, lengths: str, runs: int, out: Path | None) -> None:
    """Time an attention layer on 1 to 8 rows."""
    table = Table("cache", "", "T(1)", *(f"T({m})" for m in ROWS[1:]), "row adds, mean", "at most")
    result: dict = {"environment": environment(), "heads": heads, "seconds": {}, "added": {}}
    for length in map(int, lengths.split(",")):
        times = result["seconds"][length] = measure(heads, length, runs)
        for name, side in times.items():
            medians = [statistics.median(run[i] for run in side) for i in range(len(ROWS))]
            added = [(b - a) / medians[0] for a, b in pairwise(medians)]
            result["added"].setdefault(length, {})[name] = added
            ratios = [*(t / medians[0] for t in medians[1:]), statistics.mean(added), max(added)]
            table.add_row(str(length), name, f"{medians[0] * 1e3:.1f} ms", *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=130).print(table)
    line = json.dumps(result)
    if out is not None:
        out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
