"""Predict tokens per second by number of drafts, of a DFlash2 block drafter and of MTP heads, on Apple's chips.

    python -m bench.cost_model.drafters --model Qwen3.6-27B [--context 4096] [--block-rates 0.9,0.85]

Run it at the checkout's root. Nothing here is measured. How often drafts are accepted is an assumption, from figures
that others published. --block-rates and --head-rates replace it by the shares of drafts that are accepted, each after
an accepted one; the last share also holds for later drafts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, repeat
from operator import mul
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mlx_mtp.bench.result import new_table
from mlx_mtp.bench.roofline.chips import Chip, fitted_chips
from mlx_mtp.bench.roofline.cost import ALL, PassCosts, PassShape, collect, of_drafts, of_model, seconds
from mlx_mtp.bench.roofline.models import MODELS, gqa, mlp
from mlx_mtp.bench.roofline.ops import LinearOp, ModelOps, Op
from mlx_mtp.bench.roofline.phases import SHOWN_OVERLAP
from mlx_mtp.cli.bench_options import numbers

CHIPS = ("M1 Max", "M2 Max", "M3 Max 40c", "M4 Max 40c", "M5 Max 40c")
HEAD_DRAFTS, BLOCK_DRAFTS = range(1, 4), range(1, 16)
PLAIN, HEADS, BLOCK = "plain", "MTP heads", "DFlash2"
LAYERS, TAPS, WINDOW = 5, 5, 2048  # the last layer reads the whole context
BITS = 8  # others report that 4 bits lose acceptance
# Launches of `bench/launches/drafters.py`'s DFlash2 drafter in recorded graphs.
LAYER_LAUNCHES, FIXED_LAUNCHES, DRAFT_LAUNCHES = 42, 26, 9


@dataclass(frozen=True)
class Assumed:
    """Assumed acceptance of a model's drafts.

    block, heads: of a block drafter and of MTP heads, for the first, second, ... draft of a cycle, the probability
    that it is accepted if the ones before it are; the last also holds for later drafts. hidden: the model's hidden
    size. source: where the figures are from.
    """

    hidden: int
    block: Sequence[float]
    source: str
    heads: Sequence[float] = (0.80, 0.70)


HEADS_SOURCE = (
    "MTP heads: 80% for Qwen3.6-27B's first draft (vllm-mlx#660), then a fall like that of Gemma 4's: 84, 60, 39 and "
    "27% by position (spark-vllm-docker#343)"
)
ASSUMED = {
    "Qwen3.6-27B": Assumed(5120, (0.90,), "5.65 tokens in a cycle of 8 rows, Qwen3.8-27B (vmlx-swift#276)"),
    "Qwen3.6-35B-A3B": Assumed(2048, (0.87,), "85 to 89% accepted, DFlash (Rapid-MLX#472)"),
    "GLM-4.7-Flash": Assumed(2048, (0.915,), "6 tokens in a cycle of 8 rows, GLM-5.3-Flash (mlx-vlm#2074)"),
}


def tokens_per_cycle(rates: Sequence[float], k: int) -> float:
    """Return the expected tokens of a cycle with k drafts. rates: as `block` of `Assumed`, at least one."""
    each = islice(chain(rates, repeat(rates[-1])), k)
    return 1 + sum(accumulate(each, mul))


def of_block(h: int, lm_head: LinearOp, k: int, at: PassShape, chip: Chip) -> PassCosts:
    """Return the costs of k drafts of a DFlash2 drafter after a verify of k + 1 rows; `at.m` is ignored.

    h: hidden size. The drafter's sizes are those of a published header in proportion: five layers, MLPs of 3 h, 8 KV
    heads of 128; 32 query heads are assumed.
    """
    rows, work = k + 1, list[tuple[int, Op, int]]()
    context = _stored([LinearOp("fc", h, TAPS * h), *(LinearOp(n, 8 * 128, h) for n in "kv" for _ in range(LAYERS))])
    work += [(1, op, rows) for op in context]
    for layer in range(LAYERS):
        window = WINDOW if layer + 1 < LAYERS else None
        convolutions = (LinearOp("kernels", 4 * h // 16, h) for _ in range(2))
        ops = _stored([*gqa(h, 32, 8, 128, window=window), *mlp(h, 3 * h), *convolutions])
        work += [(1, op, rows) for op in ops]
    work += [(1, op, k) for op in (*_stored([LinearOp("selector", 256, h)]), lm_head)]
    return collect(work, at, chip, FIXED_LAUNCHES + LAYERS * LAYER_LAUNCHES + DRAFT_LAUNCHES * k)


def _stored(ops: Iterable[Op]) -> list[Op]:
    """Return the operations, those of linear layers with weights of BITS bits."""
    return [LinearOp(op.name, op.n, op.k, BITS) if isinstance(op, LinearOp) else op for op in ops]


def by_drafts(
    model: ModelOps,
    assumed: Assumed,
    chips: dict[str, Chip],
    context: int,
    drafts: Iterable[int] = BLOCK_DRAFTS,
) -> list[dict[str, Any]]:
    """Return predictions with our kernels: a line for plain decoding, and for each number of drafts of each drafter.

    A line has drafter, drafts and tokens of a cycle, and its seconds and tokens_per_second, each by name of CHIPS.
    MTP heads have HEAD_DRAFTS drafts. chips: by name. drafts: numbers of drafts of the block drafter.
    """
    every = [(PLAIN, 0), *((HEADS, k) for k in HEAD_DRAFTS), *((BLOCK, k) for k in drafts)]
    found = []
    for drafter, k in every:
        rates = assumed.heads if drafter == HEADS else assumed.block
        tokens = tokens_per_cycle(rates, k)
        times = {name: _cycle(model, assumed.hidden, drafter, k, chips[name], context) for name in CHIPS}
        speeds = {name: tokens / time for name, time in times.items()}
        found.append(
            {"drafter": drafter, "drafts": k, "tokens": tokens, "seconds": times, "tokens_per_second": speeds}
        )
    return found


def _cycle(model: ModelOps, hidden: int, drafter: str, k: int, chip: Chip, context: int) -> float:
    """Return the predicted seconds of a cycle with k drafts."""
    at = PassShape(k + 1, ALL, context, SHOWN_OVERLAP)
    costs = [of_model(model, at, chip)]
    if drafter == HEADS:
        costs.append(of_drafts(model, k, at, chip))
    elif k:
        costs.append(of_block(hidden, model.head, k, at, chip))
    return sum(seconds(cost, chip) for cost in costs)


def table_of(name: str, assumed: Assumed, lines: Sequence[dict[str, Any]], context: int) -> Table:
    """Return a table of predicted tokens per second by drafter and number of drafts, on several chips."""
    plain = lines[0]["tokens_per_second"]
    title = f"predicted, not measured: tokens/s of {name} after {context} tokens of context"
    block, heads = (", ".join(f"{100 * rate:.3g}%" for rate in rates) for rates in (assumed.block, assumed.heads))
    caption = (
        f"(times plain decoding). Assumed: a draft is accepted, after an accepted one, in {block} of cases with "
        f"DFlash2 and in {heads} with MTP heads, the last figure for all later ones ({assumed.source}); "
        "all weights in 4 bits, the drafter's in 8; kernels as planned, also for more than 8 rows"
    )
    table = new_table(title, "drafter", "drafts", "tokens/cycle", *CHIPS, left=1, caption=caption)
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        speeds = [f"{speed:.0f} ({speed / plain[chip]:.2f}x)" for chip, speed in line["tokens_per_second"].items()]
        last = following is None or following["drafter"] != line["drafter"]
        drafts = "" if line["drafter"] == PLAIN else str(line["drafts"])
        table.add_row(line["drafter"], drafts, f"{line['tokens']:.2f}", *speeds, end_section=last)
    return table


@click.command(help=__doc__)
@click.option("--model", type=click.Choice([*ASSUMED], case_sensitive=False), required=True)
@click.option("--context", type=click.IntRange(1), default=4096)
@click.option("--block-rates", callback=partial(numbers, float))
@click.option("--head-rates", callback=partial(numbers, float))
def main(model: str, context: int, block_rates: tuple[float, ...], head_rates: tuple[float, ...]) -> None:
    if wrong := [rate for rate in (*block_rates, *head_rates) if not 0 <= rate <= 1]:
        raise click.BadParameter(f"rate {wrong[0]:g} of accepted drafts; allowed are 0 to 1")
    found = ASSUMED[model]
    sources = (
        "DFlash2: as given" if block_rates else found.source,
        "MTP heads: as given" if head_rates else HEADS_SOURCE,
    )
    assumed = Assumed(found.hidden, block_rates or found.block, "; ".join(sources), head_rates or found.heads)
    lines = by_drafts(MODELS[model], assumed, fitted_chips(), context)
    Console(width=160).print(table_of(model, assumed, lines, context))


if __name__ == "__main__":
    main()
