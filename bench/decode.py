"""Time mlx-lm's own loop, our plain loop, MTP at k = 1.., and adaptive drafting, on one checkpoint and prompts.

    python bench/decode.py [--model DIR] [--draft-model NAME] [--runs 5] [--max-tokens 100] [--ignore-eos]
                           [--per-category N] [--out FILE]

For each prompt all contenders take turns, so that a machine that slows down affects all of them. A speed is the
number of tokens after the first over the time since the first, summed over prompts; ratios are within a run, and
their median is shown. The texts must be equal. "adaptive" is the default; it measures costs while it generates and
keeps them for the next prompt. It also runs with heads of random weights, which shows its loss with useless drafts.
"compiled" loops record and replay cycles (`compile_cycles`) after a warm-up. With --draft-model the same loops run
with that drafter, too. The last line is one JSON object with every raw time.
"""

import json
import statistics
import warnings
from pathlib import Path

import click
import mlx.core as mx
from mlx.utils import tree_map
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench import timing
from mlx_mtp.bench.decode import Loop, LoopSettings, MlxLm, Ours, PrefilledLoop, twin
from mlx_mtp.bench.result import environment
from mlx_mtp.bench.subject import reset_costs
from mlx_mtp.decoding.summary import paused, percentages
from mlx_mtp.demo import demo_path

HERE = Path(__file__).parent
USELESS, COMPILED = "adaptive, useless heads", "adaptive, compiled"
REPETITIVE = 40  # a text with fewer distinct 8-grams per 100 tokens is repetitive


def read_prompts(tokenizer, file: Path, per_category: int | None = None) -> list[tuple[str, list[int]]]:
    """Return (category, token ids) of all prompts or of the first of each category; chats use the template."""
    prompts = []
    for category, entries in json.loads(file.read_text()).items():
        for entry in entries[:per_category]:
            if isinstance(entry, str):
                prompts.append((category, tokenizer.encode(entry)))
                continue
            roles = ("user", "assistant")
            turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(entry["chat"])]
            prompts.append((category, tokenizer.apply_chat_template(turns, add_generation_prompt=True)))
    return prompts


def sibling(model, path: Path):
    """Load the checkpoint again with the arrays of `model`: a copy that is idle for a while would start slowly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other, _ = mlx_mtp.load(path)
    other.update(model.parameters())
    reset_costs(other)
    return other


def with_useless_heads(model, path: Path):
    """Return a model with the same trunk and heads of random weights."""
    other = sibling(model, path)
    for head in other.mtp:
        head.update(tree_map(_noise, head.parameters()))
    mx.eval(other.parameters())
    return other


def with_drafter(path: Path, name: str) -> list[Loop]:
    """Return loops with the drafter `name`: its maximum of drafts, adaptive (with heads, too), and compiled."""
    models = [mlx_mtp.load(path, draft_model=name)[0] for _ in range(2)]  # costs are stored with a model
    for model in models:
        reset_costs(model)
    model, other = models
    most = model.max_draft_tokens
    return [
        Ours(model, f"drafter, k={most}", most, {"adaptive": False}),
        Ours(model, "drafter, adaptive", None),
        Ours(other, "drafter, adaptive, compiled", None, {"compile_cycles": True}),
    ]


def _noise(w: mx.array) -> mx.array:
    return mx.random.normal(w.shape).astype(w.dtype) * mx.std(w)


def distinct_8grams(text: list[int]) -> float:
    """Return the distinct 8-grams per 100 tokens."""
    grams = {tuple(text[i : i + 8]) for i in range(len(text) - 7)}
    return 100 * len(grams) / max(1, len(text) - 7)


def measure(loops: list[Loop], prompts: list, settings: LoopSettings, runs: int) -> tuple[dict, list, dict]:
    """Return seconds[loop][run][prompt], the texts, which must be equal for all loops, and each loop's counters."""
    readers = [{loop.name: PrefilledLoop(loop, prompt, settings).read() for loop in loops} for _, prompt in prompts]
    turns = [{name: reader.run for name, reader in of_prompt.items()} for of_prompt in readers]
    for each in turns:
        timing.interleaved(each, 0)  # a warm-up on all prompts, which also records cycles
    found = [timing.interleaved(each, runs, warmups=0) for each in turns]
    texts = [next(iter(each.values()))[0].tokens for each in found]
    stats = {loop.name: mlx_mtp.Stats() for loop in loops if loop.stats}
    for i, each in enumerate(found):
        for name, done in each.items():
            for run in done:
                if run.tokens != texts[i]:
                    raise SystemExit(f"{name} wrote another text for prompt {i}: {run.tokens} instead of {texts[i]}")
                if run.stats:
                    stats[name].add(run.stats)
    seconds = {loop.name: [[each[loop.name][run].seconds for each in found] for run in range(runs)] for loop in loops}
    return seconds, texts, stats


def speeds(seconds: dict, texts: list, chosen: list[int]) -> dict[str, list[float]]:
    """Return tokens per second of each contender and run over the chosen prompts."""
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
            percentages(counts.by_depth) if drafting else paused(counts.paused) if counts else "",
            _lengths(counts) if drafting else "",
        )
    console.print(table)
    names = [name for name in total if name != "k=0"]
    table = Table("category", "tokens", "8-grams", *names, title="speed over that of k = 0")
    groups = {category: [i for i in everything if prompts[i][0] == category] for category, _ in prompts}
    groups["all but repetitive"] = [i for i in everything if distinct_8grams(texts[i]) >= REPETITIVE]
    groups = {category: chosen for category, chosen in groups.items() if chosen}
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
    """Return the shares of cycles by the number of drafts verified."""
    return " ".join(f"{k}:{n / counts.cycles:.0%}" for k, n in sorted(counts.lengths.items()))


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--draft-model", help="A drafter to compare with the heads: a directory, a hub name or demo-block.")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HERE / "prompts.json")
@click.option("--runs", default=5, show_default=True)
@click.option("--max-tokens", default=100, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on behind the end of an answer, to --max-tokens.")
@click.option("--per-category", type=click.IntRange(1), help="Only the first prompts of each category.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(
    model: str,
    draft_model: str | None,
    prompts: Path,
    runs: int,
    max_tokens: int,
    ignore_eos: bool,
    per_category: int | None,
    out: Path | None,
) -> None:
    """Compare mlx-lm's loop, our plain loop and MTP on one checkpoint."""
    ours, tokenizer = mlx_mtp.load(model)
    reset_costs(ours)
    plain = {f"k={k}": {"adaptive": False} for k in range(min(ours.max_draft_tokens, 3) + 1)}
    loops: list[Loop] = [MlxLm(twin(ours))]
    loops += [Ours(ours, name, k, options) for k, (name, options) in enumerate(plain.items())]
    # Costs are stored with a model, so loops with other costs need their own model.
    other = sibling(ours, Path(model))
    loops += [
        Ours(ours, "adaptive", None),
        Ours(other, "k=0, compiled", 0, {"adaptive": False, "compile_cycles": True}),
        Ours(other, COMPILED, None, {"compile_cycles": True}),
        Ours(with_useless_heads(ours, Path(model)), USELESS, None),
    ]
    loops += with_drafter(Path(model), draft_model) if draft_model else []
    encoded = read_prompts(tokenizer, prompts, per_category)
    settings = LoopSettings(max_tokens, stop_tokens=frozenset(() if ignore_eos else tokenizer.eos_token_ids))
    seconds, texts, stats = measure(loops, encoded, settings, runs)
    print_tables(seconds, texts, encoded, stats)
    result = {
        "environment": environment(),
        "model": Path(model).name,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
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
