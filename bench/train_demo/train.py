"""Train the demo model: python -m bench.train_demo.train [--out DIR].

Several times faster on Linux with OpenBLAS preloaded, OPENBLAS_NUM_THREADS=1 and MLX_BFS_MAX_WIDTH=100000
(the two halves of a batch then run in parallel), and MALLOC_ARENA_MAX=1, MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=17179869184 (freed memory is kept instead of being mapped again by every operation).
"""

import itertools
import math
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.step3p5 import ModelArgs
from tokenizers import Tokenizer

from . import checkpoint, self_written
from .card import MAX_SAMPLE_TOKENS, Run, model_card
from .config import DEPTHS, demo_config
from .data import PHASES, Phase, epoch, load_corpus
from .evaluate import FIRST_PROMPTS, distinct_share, evaluate, greedy_samples, held_out_prompts
from .network import DemoModel, balance_router, build, foresight_loss, joint_loss
from .tokenizer import as_text, save_tokenizer, train_tokenizer
from .trainer import Trainer

ROWS, SLOTS = 8, 256
PEAK_LEARNING_RATE = 2e-3
RESTART_STEPS = 30  # at whose end a later phase has the rate of the schedule
PROMPTS_PER_STEP = 2  # of the whole run; each makes some 90 tokens of self-written text
LOG_EVERY, SAVE_EVERY, BALANCE_EVERY = 10, 100, 10


def token_stream(
    corpus: dict[str, list], tokenizer: Tokenizer, seed: int, phase: Phase, written: list[list[int]]
) -> Iterator[int]:
    """Yield token ids of epochs, each shuffled and phrased differently, with the documents in `written`."""
    rng = random.Random(seed)
    while True:
        texts = [as_text(document) for document in epoch(corpus, rng, phase)]
        documents = [*(encoding.ids for encoding in tokenizer.encode_batch(texts)), *written]
        rng.shuffle(documents)
        yield from itertools.chain.from_iterable(documents)


def batches(stream: Iterator[int], rows: int = ROWS, slots: int = SLOTS) -> Iterator[mx.array]:
    """Token arrays [rows, slots + DEPTHS + 1]; consecutive rows overlap by their last DEPTHS + 1 tokens."""
    extra = DEPTHS + 1
    window = list(itertools.islice(stream, extra))
    starts = np.arange(rows)[:, None] * slots
    while True:
        window = window[-extra:] + list(itertools.islice(stream, rows * slots))
        yield mx.array(np.array(window, dtype=np.int32)[starts + np.arange(slots + extra)])


def learning_rate(step: int, steps: int, peak: float, first: int = 0) -> float:
    """Return the rate of step `step` (from 0) of `steps`: linear warmup over 4% of them, then a cosine.

    The warmup has at least one step. The cosine falls from `peak` towards 2% of it. first: the step at which a phase
    begins; if it is not 0, the rate rises linearly to that of the schedule over RESTART_STEPS.
    """
    warmup = max(1, steps // 25)
    if step < warmup:
        return peak * (step + 1) / warmup
    peak *= min(1.0, (step - first + 1) / RESTART_STEPS) if first else 1.0
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def describe(model: DemoModel, out: Path, corpus: dict[str, list], tokenizer: Tokenizer, run: Run) -> None:
    """Evaluate the saved checkpoint (as stored, in bf16) and write its model card."""
    report = evaluate(model, tokenizer, corpus)
    prompts = [*FIRST_PROMPTS, *held_out_prompts(corpus, 16, 8)]
    samples = greedy_samples(out, prompts, max_tokens=MAX_SAMPLE_TOKENS)
    variety = [distinct_share(tokenizer.encode(answer).ids) for _, answer in samples[len(FIRST_PROMPTS) :]]
    (out / "README.md").write_text(model_card(run, report, samples, variety))


def train(
    model: DemoModel,
    data: Iterator[mx.array],
    out: Path,
    *,
    config: dict,
    first: int,
    last: int,
    steps: int,
    phase: Phase,
) -> list[float]:
    """Steps first..last of a schedule of `steps`, saving now and then; returns losses [1 + DEPTHS]."""
    loss = foresight_loss if phase.self_written else joint_loss
    schedule = partial(learning_rate, first=first)
    trainer = Trainer(model, loss, steps=steps, peak=phase.rate * PEAK_LEARNING_RATE, schedule=schedule)
    start, recent = time.perf_counter(), []
    for step, tokens in enumerate(itertools.islice(data, last - first), start=first + 1):
        recent = [*recent[1 - LOG_EVERY :], trainer.step(step - 1, tokens)]
        if (step - 1) % BALANCE_EVERY == 0:
            balance_router(model, tokens[:2, :SLOTS], rate=0.01)
        if step % LOG_EVERY == 0:
            losses = " ".join(f"{x:.3f}" for x in mx.stack(recent).mean(axis=0).tolist())
            speed = (step - first) * ROWS * SLOTS / (time.perf_counter() - start)
            click.echo(f"step {step}/{steps}  main and depths {losses}  {speed:.0f} tokens/s")
        if step % SAVE_EVERY == 0 or step == last:
            checkpoint.save(model, config, out)
    return mx.stack(recent).mean(axis=0).tolist()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="mlx-mtp-demo", show_default=True)
@click.option("--steps", default=3000, show_default=True, help="Updates; the schedule ends with the last one.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and of the data's order.")
def main(out: Path, steps: int, seed: int) -> None:
    """Train the demo model on the standard library of this Python and write a Step-3.5 checkpoint to OUT."""
    mx.set_default_device(mx.cpu)
    corpus = load_corpus()
    texts = (as_text(document) for document in epoch(corpus, random.Random(seed), PHASES[0]))
    tokenizer = train_tokenizer(texts)
    config = demo_config(tokenizer.get_vocab_size())
    model = build(ModelArgs.from_dict(config), seed, DEPTHS)
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out)
    start = time.perf_counter()
    shares = list(itertools.accumulate((phase.share for phase in PHASES), initial=0))
    bounds = [steps * share // shares[-1] for share in shares]
    for i, (phase, (first, last)) in enumerate(zip(PHASES, itertools.pairwise(bounds), strict=True)):
        written = []
        if phase.self_written:
            written = self_written.write(out, tokenizer, corpus, seed=seed, count=steps * PROMPTS_PER_STEP)
        data = batches(token_stream(corpus, tokenizer, seed + i, phase, written))
        losses = train(model, data, out, config=config, first=first, last=last, steps=steps, phase=phase)
        model = checkpoint.load(out)  # in bf16: each phase, and the evaluation, starts from what is stored
    minutes = (time.perf_counter() - start) / 60
    parameters = sum(value.size for _, value in tree_flatten(model.parameters()))
    machine = f"{os.cpu_count()} CPU cores"
    run = Run(parameters, steps, steps * ROWS * SLOTS, seed, minutes, losses, machine)
    describe(model, out, corpus, tokenizer, run)


if __name__ == "__main__":
    main()
