"""Train the demo's block drafter: python -m bench.train_demo.block [--out DIR] [--target DIR].

The settings for OpenBLAS in `train.py` apply. On another target the drafts are of that target's own text.
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
from tokenizers import Tokenizer

from mlx_mtp.demo import demo_path
from mlx_mtp.layers.block_drafter import BlockNetwork
from mlx_mtp.training.optimize import adam

from . import block_anchors, block_network, checkpoint, written_streams
from .block_card import block_card
from .block_network import DRAFTS, TAPS, Anchors, Frozen, block_config
from .data import load_corpus
from .trainer import Trainer
from .written_streams import Streams, prompts

SLOTS, WRITTEN, HELD = 512, 512, 16  # tokens of a stream; streams to train on before new ones, to evaluate
PASSES = 3  # over the streams before new ones are written
ROWS, ANCHORS, SHORT = 16, 20, 3  # stretches of a step, anchors of a stretch, drafts in every other step
PEAK_LEARNING_RATE = 2.5e-3
MUON_RATE = 8
STREAMS = 4  # more than cores, so that other processes delay a step less
LOG_EVERY, SAVE_EVERY = 20, 200


def tokens_per_cycle(net: BlockNetwork, frozen: Frozen, streams: Streams) -> float:
    """Return the tokens that a cycle of full blocks yields on the streams' documents."""
    known = block_anchors.drafts_known(streams)
    right = np.zeros(known.shape[:2], int)
    for slots, batch in block_anchors.every_slot(streams, known, ROWS):
        best = block_network.logits(net, frozen, batch).argmax(axis=-1)
        same = (best == batch.tokens[..., 1:]) * batch.weight
        right[slots] = np.array(mx.cumprod(same, axis=-1).sum(axis=-1))
    return known[..., 0].sum() / block_anchors.cycles(right, known[..., 0])


def train(
    net: BlockNetwork, frozen: Frozen, data: Iterator[Anchors], held: Streams, *, steps: int, out: Path, config: dict
) -> None:
    """Train for `steps` steps; log the share of right drafts by depth, given the tokens before, and save."""
    loss = partial(_loss, frozen=frozen)
    trainer = Trainer(net, loss, steps=steps, peak=PEAK_LEARNING_RATE, optimizer=MuonAndAdam(), count=STREAMS)
    start, counts = time.perf_counter(), []
    for step, batch in zip(range(1, steps + 1), data, strict=False):
        drafts = SHORT if step % 2 else DRAFTS  # later rows of a block matter less, and cost as much
        part = batch._replace(tokens=batch.tokens[..., : 1 + drafts], weight=batch.weight[..., :drafts])
        counts = [*counts[1 - LOG_EVERY :], trainer.step(step - 1, *part)]
        if step % LOG_EVERY == 0:
            right, tried = mx.stack(counts).sum(axis=0)
            shares = " ".join(f"{share:.2f}" for share in (right / tried).tolist())
            click.echo(f"step {step}/{steps}  right by depth {shares}  {time.perf_counter() - start:.0f} s")
        if step % SAVE_EVERY == 0 or step == steps:
            block_network.save(net, config, out)
            click.echo(f"held out: {tokens_per_cycle(net, frozen, held):.2f} tokens per cycle")


class MuonAndAdam(optimizers.MultiOptimizer):
    """An optimizer: Muon for the parameters for which `_is_matrix` returns True, AdamW for the others.

    `learning_rate` is that of AdamW; Muon's is MUON_RATE times as large.
    """

    def __init__(self) -> None:
        super().__init__([optimizers.Muon(learning_rate=0.0, weight_decay=0.0), adam()], [_is_matrix])

    @property
    def learning_rate(self) -> mx.array:
        return self.optimizers[1].learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.optimizers[0].learning_rate, self.optimizers[1].learning_rate = MUON_RATE * rate, rate


def _is_matrix(path: str, parameter: mx.array) -> bool:
    return parameter.ndim == 2 and path.startswith(("fc", "layers", "markov_head.joint_proj"))


def _loss(net: BlockNetwork, *arrays: mx.array, frozen: Frozen) -> tuple[mx.array, mx.array]:
    return block_network.loss(net, frozen, Anchors(*arrays))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="mlx-mtp-demo-block", show_default=True)
@click.option("--target", type=click.Path(path_type=Path), default=demo_path(), help="The demo's checkpoint.")
@click.option("--steps", default=1400, show_default=True, help="Updates; the schedule ends with the last one.")
@click.option("--seed", default=0, show_default=True, help="Seed of the weights, the prompts and their order.")
def main(out: Path, target: Path, steps: int, seed: int) -> None:
    """Train a block drafter on text that the demo writes, and write it as a DSpark checkpoint to OUT."""
    mx.set_default_device(mx.cpu)
    start, cpu = time.perf_counter(), time.process_time()
    corpus, tokenizer = load_corpus(), Tokenizer.from_file(str(target / "tokenizer.json"))
    unseen = {"docs": corpus["held_docs"], "code": corpus["held_code"]}
    model, theirs = checkpoint.load(target), json.loads((target / "config.json").read_text())
    held = written_streams.write(model, prompts(unseen, tokenizer, seed), TAPS, streams=HELD, slots=SLOTS)
    given = prompts(corpus, tokenizer, seed)
    texts = iter(lambda: written_streams.write(model, given, TAPS, streams=WRITTEN, slots=SLOTS), None)
    config = block_config(theirs)
    net = block_network.network(config, theirs, seed)
    frozen = Frozen(model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm)
    block_network.prepare(net, frozen, mx.array(held.states.reshape(-1, held.states.shape[-1]), mx.float32))
    data = block_anchors.batches(texts, np.random.default_rng(seed), ROWS, ANCHORS, PASSES)
    train(net, frozen, data, held, steps=steps, out=out, config=config)
    minutes = (time.perf_counter() - start) / 60, (time.process_time() - cpu) / 60
    stored = block_network.load(out, theirs)
    card = block_card(stored, steps, seed, minutes, tokens_per_cycle(stored, frozen, held))
    (out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
