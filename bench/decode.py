"""Decoding speed: mlx-lm's own loop, our plain loop, MTP at k = 1.., and adaptive, on one checkpoint and prompts.

    python bench/decode.py [--model DIR] [--runs 5] [--max-tokens 100] [--out FILE]

Every run takes all contenders in turn, prompt by prompt, so that a machine that slows down slows them all. A speed is
tokens after the first over the time since the first, summed over prompts; ratios are within a run, their median is
shown. The texts must be equal. "adaptive" is what a user gets who says nothing; it learns costs while it generates,
and knows them from one prompt to the next. It is run with heads of random weights, too: what it then loses. In
"compiled" loops cycles are recorded and replayed (`compile_cycles`), for which the warm-up pays. The last line is one
JSON object with every raw time.
"""

import json
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.demo import demo_path

HERE = Path(__file__).parent
USELESS, COMPILED = "adaptive, useless heads", "adaptive, compiled"
REPETITIVE = 40  # distinct 8-grams per 100 tokens, below which a text repeats itself


def read_prompts(tokenizer, file: Path) -> list[tuple[str, list[int]]]:
    """(category, token ids) of every prompt; a chat goes through the template."""
    prompts = []
    for category, entries in json.loads(file.read_text()).items():
        for entry in entries:
            if isinstance(entry, str):
                prompts.append((category, tokenizer.encode(entry)))
                continue
            roles = ("user", "assistant")
            turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(entry["chat"])]
            prompts.append((category, tokenizer.apply_chat_template(turns, add_generation_prompt=True)))
    return prompts


def plain_mlx_lm(path: Path, expand: bool):
    """The trunk as mlx-lm itself loads it, in our model's precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = mlx_lm.load(str(path))
    if expand:
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def with_useless_heads(path: Path):
    """The model with heads of random weights, as large as the trained ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = mlx_mtp.load(path)
    for head in model.mtp:
        head.update(tree_map(_noise, head.parameters()))
    mx.eval(model.parameters())
    return model


def _noise(w: mx.array) -> mx.array:
    return mx.random.normal(w.shape).astype(w.dtype) * mx.std(w)


def tokens_of_mlx_lm(model, prompt: list[int], n: int, stops: set[int]) -> Iterator[int]:
    for token, _ in mlx_lm_generate_step(mx.array(prompt), model, max_tokens=n):
        yield token
        if token in stops:
            return


def tokens_of_ours(model, prompt: list[int], n: int, stops: set[int], stats, **options) -> Iterator[int]:
    own = mlx_mtp.Stats()
    for token, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=n, stop_tokens=stops, stats=own, **options):
        yield token
    stats.add(own)


def timed(tokens: Iterator[int]) -> tuple[list[int], float]:
    """All tokens and the seconds from the first to the last."""
    out = [next(tokens)]
    tic = time.perf_counter()
    out.extend(tokens)
    return out, time.perf_counter() - tic


def distinct_8grams(text: list[int]) -> float:
    """Distinct 8-grams per 100 tokens."""
    grams = {tuple(text[i : i + 8]) for i in range(len(text) - 7)}
    return 100 * len(grams) / max(1, len(text) - 7)


def measure(contenders: dict, prompts: list, runs: int) -> tuple[dict, list]:
    """seconds[contender][run][prompt] and the texts, which every contender must agree on."""
    seconds = {name: [[0.0] * len(prompts) for _ in range(runs)] for name in contenders}
    texts: list = [None] * len(prompts)
    for run in range(-1, runs):  # the first is a warm-up
        for i, (_, prompt) in enumerate(prompts):
            for name, generate in contenders.items():
                text, elapsed = timed(generate(prompt))
                texts[i] = texts[i] or text
                if text != texts[i]:
                    raise SystemExit(f"{name} wrote another text for prompt {i}: {text} instead of {texts[i]}")
                if run >= 0:
                    seconds[name][run][i] = elapsed
    return seconds, texts


def speeds(seconds: dict, texts: list, chosen: list[int]) -> dict[str, list[float]]:
    """Tokens per second of each contender and run over the chosen prompts."""
    tokens = sum(len(texts[i]) - 1 for i in chosen)
    return {name: [tokens / sum(run[i] for i in chosen) for run in runs] for name, runs in seconds.items()}


def print_tables(seconds: dict, texts: list, prompts: list, stats: dict) -> None:
    console = Console(width=130)
    everything = list(range(len(prompts)))
    total = speeds(seconds, texts, everything)
    table = Table(
        "loop", "tok/s best", "median", "vs mlx-lm", "vs k=0", "tok/cycle", "accepted per depth", "cycles by drafts"
    )
    for name, values in total.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, total[base], strict=True)) for base in ("mlx-lm", "k=0")
        ]
        counts = stats.get(name)
        drafting = counts is not None and any(counts.drafted)
        table.add_row(
            name,
            f"{max(values):.0f}",
            f"{statistics.median(values):.0f}",
            *(f"{ratio:.2f}x" for ratio in ratios),
            f"{counts.tokens_per_cycle:.2f}" if drafting else "",
            " / ".join(f"{rate:.0%}" for rate in counts.acceptance) if drafting else "",
            _lengths(counts) if drafting else "",
        )
    console.print(table)
    names = [name for name in total if name != "k=0"]
    table = Table("category", "tokens", "8-grams", *names, title="speed over that of k = 0")
    groups = {category: [i for i in everything if prompts[i][0] == category] for category, _ in prompts}
    groups["all but repetitive"] = [i for i in everything if distinct_8grams(texts[i]) >= REPETITIVE]
    for category, chosen in groups.items():
        part = speeds(seconds, texts, chosen)
        row = [category, str(sum(len(texts[i]) for i in chosen))]
        row.append(f"{statistics.mean(distinct_8grams(texts[i]) for i in chosen):.0f}")
        for name, values in part.items():
            if name != "k=0":
                row.append(f"{statistics.median(a / b for a, b in zip(values, part['k=0'], strict=True)):.2f}x")
        table.add_row(*row)
    console.print(table)


def _lengths(counts) -> str:
    """Shares of cycles by the number of drafts that they verified."""
    return " ".join(f"{k}:{n / counts.cycles:.0%}" for k, n in sorted(counts.lengths.items()))


def environment() -> dict:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "device": str(mx.default_device()),
        "blas": Path(os.environ.get("LD_PRELOAD", "mlx's own")).name,
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm")},
        "commit": commit.stdout.strip(),
    }


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HERE / "prompts.json")
@click.option("--runs", default=5, show_default=True)
@click.option("--max-tokens", default=100, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(model: str, prompts: Path, runs: int, max_tokens: int, out: Path | None) -> None:
    """Compare mlx-lm's loop, our plain loop and MTP on one checkpoint."""
    ours, tokenizer = mlx_mtp.load(model)
    theirs = plain_mlx_lm(Path(model), ours.report().expanded)
    stops = set(tokenizer.eos_token_ids)
    loops: dict[str, dict] = {
        f"k={k}": {"num_draft_tokens": k, "adaptive": False} for k in range(min(ours.max_draft_tokens, 3) + 1)
    }
    loops["adaptive"] = {}
    compiled = {"k=0, compiled": {**loops["k=0"], "compile_cycles": True}, COMPILED: {"compile_cycles": True}}
    stats = {name: mlx_mtp.Stats() for name in (*loops, *compiled, USELESS)}
    contenders = {"mlx-lm": lambda prompt: tokens_of_mlx_lm(theirs, prompt, max_tokens, stops)}
    for name, options in loops.items():
        contenders[name] = partial(tokens_of_ours, ours, n=max_tokens, stops=stops, stats=stats[name], **options)
    # Costs are remembered with a model: loops that cost otherwise have one of their own.
    other, _ = mlx_mtp.load(model)
    for name, options in compiled.items():
        contenders[name] = partial(tokens_of_ours, other, n=max_tokens, stops=stops, stats=stats[name], **options)
    useless = with_useless_heads(Path(model))
    contenders[USELESS] = partial(tokens_of_ours, useless, n=max_tokens, stops=stops, stats=stats[USELESS])
    encoded = read_prompts(tokenizer, prompts)
    seconds, texts = measure(contenders, encoded, runs)
    print_tables(seconds, texts, encoded, stats)
    result = {
        "environment": environment(),
        "model": Path(model).name,
        "max_tokens": max_tokens,
        "categories": [category for category, _ in encoded],
        "tokens": [len(text) for text in texts],
        "distinct_8grams_per_100": [round(distinct_8grams(text)) for text in texts],
        "tokens_per_cycle": {name: counts.tokens_per_cycle for name, counts in stats.items()},
        "acceptance": {name: counts.acceptance for name, counts in stats.items()},
        "seconds": seconds,
    }
    line = json.dumps(result)
    print(line)
    if out:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
