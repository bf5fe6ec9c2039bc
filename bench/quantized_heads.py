"""Measure what quantizing the demo costs in accepted drafts, and what `mlx-mtp tune-heads` wins back.

    python bench/quantized_heads.py [--adapter-path DIR] [--bits 4] [--count 400] [--tokens 150000] [--epochs 4]
    python bench/quantized_heads.py --make-adapter DIR

The second command trains a small LoRA adapter with mlx-lm, on docstrings of packages that the demo has not read.

Acceptance is that of three drafts at every position of greedy answers to questions about Python's standard library,
which the model writes itself. It is tuned on its own prompts and answers, as `tune-heads` is without texts, to which
the questions do not belong. An interval is one of 95% from a bootstrap over the questions. The texts of two models
differ, so the loss is less certain than the gain of the tuning, which is measured on one text.
"""

import importlib
import inspect
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.training.dense import dense
from mlx_mtp.training.measure import counts_of
from mlx_mtp.training.reading import read
from mlx_mtp.training.recording import Recording
from mlx_mtp.training.streams import interleave_streams

LEARNED = "numpy click rich.console rich.table mlx.core mlx.nn safetensors.numpy huggingface_hub jinja2 yaml"
MEASURED_ON = "json shlex heapq html urllib.parse zipfile tarfile copy weakref selectors glob fnmatch cmd timeit abc"
QUESTIONS = ["What does {} do?", "Explain {}.", "How do I use {}?", "What is {} for?"]
DRAFTS, MOST = 3, 100  # drafts of a cycle, and tokens of an answer
WAVE, DRAWS = 32, 2000  # answers of a batch, and draws of the bootstrap
TRAINING = ["--num-layers=10", "--batch-size=8", "--iters=60", "--learning-rate=2e-4", "--val-batches=2", "--seed=0"]
LORA = "lora_parameters: {rank: 4, scale: 4.0, dropout: 0.0}\n"


def documented(modules: str) -> Iterator[tuple[str, str]]:
    """Yield (full name, docstring) of the public functions and classes of modules, in a fixed order."""
    for name in modules.split():
        module = importlib.import_module(name)
        for member in sorted(vars(module)):
            value = getattr(module, member)
            if callable(value) and not member.startswith("_") and (text := inspect.getdoc(value)):
                yield f"{name}.{member}", text


def questions(count: int) -> list[str]:
    """Return different questions in a fixed order."""
    every = [question.format(name) for name, _ in documented(MEASURED_ON) for question in QUESTIONS]
    return random.Random(1).sample(every, count)


def make_adapter(to: Path) -> None:
    """Train a LoRA adapter for the demo in float32, with mlx-lm's command, and write it to a directory."""
    rng, lines = random.Random(2), list[str]()
    for name, text in documented(LEARNED):
        begin = "\n\n".join(text.split("\n\n")[:2])[:400]
        asked = {"role": "user", "content": rng.choice(QUESTIONS).format(name)}
        lines.append(json.dumps({"messages": [asked, {"role": "assistant", "content": begin}]}))
    rng.shuffle(lines)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        mlx_mtp.convert(demo_path(), folder / "demo", dtype="float32")  # MLX's CPU has no other product of experts
        (folder / "train.jsonl").write_text("\n".join(lines))
        (folder / "valid.jsonl").write_text("\n".join(lines[:20]))
        (folder / "lora.yaml").write_text(LORA)
        given = ["--model", str(folder / "demo"), "--data", made, "-c", str(folder / "lora.yaml")]
        command = [sys.executable, "-m", "mlx_lm", "lora", "--train", *given, *TRAINING, "--adapter-path", str(to)]
        subprocess.run(command, check=True)


class Answers:
    """A model's greedy answers to questions; the heads' acceptance is measured on them."""

    def __init__(self, model: Any, tokenizer: Any, asked: list[str], folder: Path):
        self.model, self.recording = model, Recording(folder, {}, model.no_hidden().shape[-1])
        chats = [[{"role": "user", "content": question}] for question in asked]
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
        options = {"max_tokens": MOST, "return_token_ids": True, "num_draft_tokens": 0}
        with dense(model.modules()):
            for first in range(0, len(prompts), WAVE):
                wave = prompts[first : first + WAVE]
                found = mlx_mtp.batch_generate(model, tokenizer, wave, **options)
                for prompt, answer in zip(wave, found.token_ids or [], strict=True):
                    tokens = [*prompt, *answer]
                    self.recording.append(tokens, *read(model, tokens), len(prompt), held=True)

    def counts(self, heads: list[Any] | None = None) -> np.ndarray:
        """Return each answer's number of positions, and of those where the first draft, two, and three are right.

        heads: those measured; None for the model's own.
        """
        own, self.model.mtp = self.model.mtp, heads or self.model.mtp
        try:
            with dense(self.model.modules()):
                documents = self.recording.documents
                found = [counts_of(self.model, self.recording, each, DRAFTS).sum(axis=0) for each in documents]
        finally:
            self.model.mtp = own
        return np.array(found)


def cycle(counts: np.ndarray) -> float:
    """Return the mean number of tokens of a cycle."""
    return counts.sum() / counts[:, 0].sum()


def difference(more: np.ndarray, less: np.ndarray) -> str:
    """Return the difference in tokens per cycle, and its interval."""
    draws = np.random.default_rng(0).integers(0, len(more), (DRAWS, len(more)))
    low, high = np.percentile([cycle(more[draw]) - cycle(less[draw]) for draw in draws], [2.5, 97.5])
    return f"{cycle(more) - cycle(less):+.3f} [{low:+.3f}, {high:+.3f}]"


def line(name: str, counts: np.ndarray) -> str:
    """Return a line: the share of right drafts by depth where the earlier ones are right, and tokens per cycle."""
    total = counts.sum(axis=0)
    shares = ", ".join(f"{right / asked:.1%}" for asked, right in itertools.pairwise(total))
    return f"{name}: {shares}; {cycle(counts):.3f} tokens per cycle at {total[0]:,} positions"


@click.command()
@click.option("--make-adapter", "to", type=click.Path(path_type=Path), help="Train a LoRA adapter, and do no more.")
@click.option("--adapter-path", help="Directory of a LoRA adapter of the demo.")
@click.option("--bits", "widths", type=int, multiple=True, default=(4, 8), show_default=True, help="Of the heads.")
@click.option("--count", default=400, show_default=True, help="Number of questions.")
@click.option("--tokens", default=150_000, show_default=True, help="Tokens to record.")
@click.option("--epochs", default=4.0, show_default=True, help="Passes over them.")
def main(
    to: Path | None, adapter_path: str | None, widths: tuple[int, ...], count: int, tokens: int, epochs: float
) -> None:
    """Print the acceptance of the demo, of its conversions to 4 bits, and of these with tuned heads."""
    if to:
        make_adapter(to)
        return
    interleave_streams()
    asked = questions(count)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        whole = Answers(*mlx_mtp.load(demo_path(), kernels="off"), asked, folder / "answers").counts()
        click.echo(line("demo", whole))
        for bits in widths:
            path, file = folder / f"heads-{bits}", folder / f"heads-{bits}.safetensors"
            mlx_mtp.convert(demo_path(), path, quantize=True, q_bits=4, mtp_q_bits=bits)
            model, tokenizer = mlx_mtp.load(path, adapter_path=adapter_path, kernels="off")
            answers = Answers(model, tokenizer, asked, folder / f"answers-{bits}")
            before = answers.counts()
            click.echo(line(f"4 bits, heads in {bits}", before))
            began = time.perf_counter(), time.process_time()
            tuned = mlx_mtp.tune_heads(model, tokenizer, out=file, tokens=tokens, epochs=epochs)
            wall, cpu = (time.perf_counter() - began[0]) / 60, (time.process_time() - began[1]) / 60
            click.echo("\n".join([f"tuned in {wall:.1f} minutes, {cpu:.1f} of CPU time", *tuned.lines()]))
            if tuned.file:
                after = answers.counts(mlx_mtp.load(path, mtp_path=file, kernels="off")[0].mtp)
                click.echo(line(f"4 bits, tuned heads in {bits}", after))
                click.echo(f"lost {difference(whole, before)}, won back {difference(after, before)} tokens per cycle")


if __name__ == "__main__":
    main()
