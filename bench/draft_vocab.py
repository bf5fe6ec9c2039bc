"""Measure what a reduced draft vocabulary saves and loses: acceptance, tokens and time per cycle, bytes of heads.

    python bench/draft_vocab.py [--runs 3] [--max-tokens 100] [--out FILE]

Lists of each size for the demo model come from Python files of the standard library that no prompt mentions, and from
the tokenizer's ranks alone; all contenders take turns, prompt by prompt. The texts must be equal. Acceptance and
tokens per cycle are counts; times depend on the preloaded BLAS. The last line is one JSON object with all raw
figures.
"""

import json
import logging
import statistics
import warnings
from collections import Counter
from pathlib import Path

import click
from decode import HERE, measure, read_prompts
from rich.console import Console
from rich.table import Table
from train_demo.data import HELD_OUT_MODULES
from train_demo.library import source_files

import mlx_mtp
from mlx_mtp.bench.decode import Loop, LoopSettings, Ours
from mlx_mtp.bench.result import environment
from mlx_mtp.checkpoint.draft_vocab import most_frequent
from mlx_mtp.decoding.summary import percentages
from mlx_mtp.demo import demo_path

SIZES = (128, 256, 512, 1024, 2048)


def counted(tokenizer, files: int) -> Counter[int]:
    """Return the frequency of each token in evenly spread files of the library, without the prompts' modules."""
    sources = [source for name, source in source_files() if name.partition(".")[0] not in HELD_OUT_MODULES]
    counts: Counter[int] = Counter()
    for source in sources[:: max(1, len(sources) // files)]:
        counts.update(tokenizer.encode(source, add_special_tokens=False))
    return counts


def lists(tokenizer, sizes: tuple[int, ...], files: int) -> dict[str, list[int]]:
    """Return the tokens of each contender by name."""
    size_of_all = max(SIZES)
    counts = {"texts": counted(tokenizer, files), "ranks": Counter[int]()}
    found = {"whole": list(range(size_of_all))}
    for kind, by_kind in counts.items():
        for size in sizes:
            found[f"{kind} {size}"] = most_frequent(tokenizer, by_kind, size, size_of_all)
    return found


def covered(texts: list[list[int]], tokens: list[int]) -> float:
    """Return the share of all generated tokens that are in a list."""
    listed = set(tokens)
    return statistics.mean(token in listed for text in texts for token in text)


def load(tokens: list[int]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mlx_mtp.load(demo_path(), draft_vocab=tokens)[0]


@click.command()
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HERE / "prompts.json")
@click.option("--limit", type=click.IntRange(1), help="Only this number of prompts, evenly spread.")
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True)
@click.option(
    "--files", type=click.IntRange(1), default=60, show_default=True, help="Files that tokens are counted in."
)
@click.option("--runs", default=3, show_default=True)
@click.option("--max-tokens", default=100, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(
    prompts: Path, limit: int | None, sizes: str, files: int, runs: int, max_tokens: int, out: Path | None
) -> None:
    """Compare draft vocabularies on the demo."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings about long texts are false
    whole, tokenizer = mlx_mtp.load(demo_path())
    chosen = lists(tokenizer, tuple(map(int, sizes.split(","))), files)
    models = {name: whole if name == "whole" else load(tokens) for name, tokens in chosen.items()}
    loops: list[Loop] = [Ours(model, name, None, {"adaptive": False}) for name, model in models.items()]
    settings = LoopSettings(max_tokens, stop_tokens=frozenset(tokenizer.eos_token_ids))
    encoded = read_prompts(tokenizer, prompts)
    encoded = encoded[:: max(1, len(encoded) // limit)][:limit] if limit else encoded
    seconds, texts, stats = measure(loops, encoded, settings, runs)
    figures = {
        name: {
            "size": len(chosen[name]),
            "covered": covered(texts, chosen[name]),
            "acceptance": counts.acceptance,
            "tokens_per_cycle": counts.tokens_per_cycle,
            "head_bytes": models[name].report.head_bytes,
            "cycles": counts.cycles // runs,
            "seconds": seconds[name],
        }
        for name, counts in stats.items()
    }
    Console(width=110).print(table(figures))
    result = {"environment": environment(), "max_tokens": max_tokens, "prompts": len(encoded), "lists": figures}
    print(line := json.dumps(result))
    if out:
        out.write_text(line + "\n")


def table(figures: dict[str, dict]) -> Table:
    found = Table(
        "list", "heads", "covers", "accepted per depth", "tok/cycle", "ms/cycle", "vs whole: cycle", "speed"
    )
    times = {name: [sum(run) for run in f["seconds"]] for name, f in figures.items()}
    for name, f in figures.items():
        faster = [a / b for a, b in zip(times["whole"], times[name], strict=True)]
        per_cycle = f["cycles"] / figures["whole"]["cycles"]
        found.add_row(
            name,
            f"{f['head_bytes'] / 1e6:.2f} MB",
            f"{f['covered']:.1%}",
            percentages(f["acceptance"], decimals=1),
            f"{f['tokens_per_cycle']:.3f}",
            f"{1e3 * statistics.median(times[name]) / f['cycles']:.2f}",
            f"{1 / (statistics.median(faster) * per_cycle):.2f}x",
            f"{statistics.median(faster):.2f}x",
        )
    return found


if __name__ == "__main__":
    main()
