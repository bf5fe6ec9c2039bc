"""Measure what quantizing the demo costs in accepted drafts, and what `mlx-mtp tune-heads` wins back.

    python bench/quantized_heads.py [--adapter-path DIR] [--count 90] [--tokens 24000] [--epochs 6]

Acceptance is that of greedy answers with three drafts in each cycle, to prompts about Python's standard library that
no tuning reads; the heads are tuned on docstrings of other modules, which the target reads as answers.
"""

import importlib
import inspect
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import mlx_mtp
from mlx_mtp.demo import demo_path

TUNED_ON = "os calendar pathlib collections functools itertools statistics textwrap tempfile threading queue sched"
TUNED_ON += " bisect argparse logging configparser csv gzip random decimal fractions datetime string difflib ast"
TUNED_ON += " dis pickle pprint enum types socket ssl asyncio subprocess shutil tokenize pdb unittest typing operator"
MEASURED_ON = "json shlex heapq html urllib.parse zipfile tarfile copy weakref selectors glob fnmatch cmd timeit abc"
QUESTIONS = ["What does {} do?", "Explain {}.", "How do I use {}?", "What is {} for?"]
DRAFTS = 3


def documented(modules: str) -> Iterator[tuple[str, str]]:
    """Yield (full name, docstring) of the public functions and classes of modules, in a fixed order."""
    for name in modules.split():
        module = importlib.import_module(name)
        for member in sorted(vars(module)):
            value = getattr(module, member)
            if callable(value) and not member.startswith("_") and (text := inspect.getdoc(value)):
                yield f"{name}.{member}", text


def accepted(model: Any, tokenizer: Any, count: int) -> str:
    """Return a line: the share of right drafts by depth where the earlier ones are right, and tokens per cycle."""
    rng, names = random.Random(1), [name for name, _ in documented(MEASURED_ON)]
    drafted, right = [0] * DRAFTS, [0] * DRAFTS
    for _ in range(count):
        question = rng.choice(QUESTIONS).format(rng.choice(names))
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        stats = mlx_mtp.Stats()
        options = {"num_draft_tokens": DRAFTS, "adaptive": False, "prompt_lookup": False, "stats": stats}
        mlx_mtp.generate(model, tokenizer, prompt, max_tokens=100, **options)
        drafted = [a + b for a, b in zip(drafted, stats.drafted, strict=True)]
        right = [a + b for a, b in zip(right, stats.accepted, strict=True)]
    # Every cycle drafts DRAFTS tokens, so drafted[0] is the number of cycles.
    shares = [part / max(whole, 1) for part, whole in zip(right, [drafted[0], *right], strict=False)]
    return f"{', '.join(f'{share:.1%}' for share in shares)}; {1 + sum(right) / drafted[0]:.3f} tokens per cycle"


@click.command()
@click.option("--adapter-path", help="Directory of a LoRA adapter of the demo.")
@click.option("--count", default=90, show_default=True, help="Number of held-out prompts.")
@click.option("--tokens", default=24_000, show_default=True, help="Tokens to record.")
@click.option("--epochs", default=6.0, show_default=True, help="Passes over them.")
def main(adapter_path: str | None, count: int, tokens: int, epochs: float) -> None:
    """Print the acceptance of the demo, of its conversions to 4 bits, and of these with tuned heads."""
    model, tokenizer = mlx_mtp.load(demo_path())
    click.echo(f"demo: {accepted(model, tokenizer, count)}")
    rng = random.Random(0)
    texts: list[Any] = [
        [{"role": "user", "content": rng.choice(QUESTIONS).format(name)}, {"role": "assistant", "content": text}]
        for name, text in documented(TUNED_ON)
    ]
    rng.shuffle(texts)
    with tempfile.TemporaryDirectory() as folder:
        for bits in (4, 8):
            path, file = Path(folder) / f"heads-{bits}", Path(folder) / f"heads-{bits}.safetensors"
            mlx_mtp.convert(demo_path(), path, quantize=True, q_bits=4, mtp_q_bits=bits)
            model, tokenizer = mlx_mtp.load(path, adapter_path=adapter_path, kernels="off")
            click.echo(f"4 bits, heads in {bits}: {accepted(model, tokenizer, count)}")
            began = time.process_time()
            tuned = mlx_mtp.tune_heads(model, tokenizer, texts, out=file, tokens=tokens, epochs=epochs)
            click.echo("\n".join([f"tuned in {(time.process_time() - began) / 60:.1f} CPU minutes", *tuned.lines()]))
            if tuned.file:
                model, tokenizer = mlx_mtp.load(path, adapter_path=adapter_path, mtp_path=file, kernels="off")
                click.echo(f"4 bits, tuned heads in {bits}: {accepted(model, tokenizer, count)}")


if __name__ == "__main__":
    main()
