"""Compare two ways to draft at a temperature, greedy and coupled to the target's draws, with the best that any could.

    python bench/draft_sampling.py [--model DIR] [-k 3] [--seeds 3] [--max-tokens 80] [--out FILE]

Every seed and prompt takes all modes in turn, so that a machine that slows down slows them all. Counted: drafts kept
per depth. Expected, and far less noisy: the same with each draft counted by its probability of being kept, given what
was drafted, from the target's p and the head's q of every row. Of the first draft alone: p(argmax q), the share that
each mode keeps of all its draws, and the bounds 1 - TV and (1 - TV) / (1 + TV), all on the text of coupled drafts.
Both give the same texts. Rejection sampling would keep the share 1 - TV, the most that any rule can, but a seed's
text would depend on what was drafted: a bound here, and no mode. Rows are recorded in a pass of their own, which
is not timed. The last line is one JSON object.
"""

import json
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from decode import HERE, read_prompts
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench.decode import timed
from mlx_mtp.bench.result import environment
from mlx_mtp.decoding.draft_sampling import DraftChooser
from mlx_mtp.decoding.sampling import DRAFT_SAMPLING, Picker
from mlx_mtp.decoding.summary import percentages
from mlx_mtp.demo import demo_path

SETTINGS = {
    "0.3": {"temp": 0.3},
    "0.6": {"temp": 0.6},
    "1.0": {"temp": 1.0},
    "0.7, top-p 0.9": {"temp": 0.7, "top_p": 0.9},
}


def coupled(p: np.ndarray, q: np.ndarray, d: int) -> float:
    """Probability that draws of p and q with one noise are both d (two sets of exponentials, the least of each)."""
    return 1 / np.maximum(p / p[d], q / q[d]).sum() if p[d] > 0 and q[d] > 0 else 0.0


def kept(mode: str, p: np.ndarray, q: np.ndarray, d: int) -> float:
    """Probability that draft d is kept, given that it was drafted."""
    if mode == "greedy":
        return p[d]
    return coupled(p, q, d) / q[d]


def of_all_draws(p: np.ndarray, q: np.ndarray) -> dict[str, float]:
    """What each mode keeps of its first drafts, and the bounds."""
    tv = 1 - np.minimum(p, q).sum()
    likely = np.argsort(-np.minimum(p, q))[:200]  # of no other token both draws are often
    return {
        "greedy": p[q.argmax()],
        "coupled": sum(coupled(p, q, d) for d in likely),
        "1-TV": 1 - tv,
        "(1-TV)/(1+TV)": (1 - tv) / (1 + tv),
    }


class Recorder:
    """Notes p, q and drafts of every row: stands in for the chooser's call and the picker's `pick`."""

    def __init__(self):
        self.q: list[mx.array] = []
        self.cycles: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.real = DraftChooser.__call__, Picker.pick

    def __enter__(self):
        DraftChooser.__call__ = lambda *args: self.choose(*args)
        Picker.pick = lambda *args: self.pick(*args)
        return self.cycles

    def __exit__(self, *_):
        DraftChooser.__call__, Picker.pick = self.real

    def choose(self, chooser: DraftChooser, output, position):
        logits = output.logits()
        self.q.append(mx.softmax(chooser.options.scores(logits - mx.logsumexp(logits), chooser.key))[0])
        return self.real[0](chooser, output, position)

    def pick(self, picker: Picker, model, hidden, position, history, drafts):
        if drafts.size:
            rows = mx.split(model.logits(hidden)[0], drafts.size + 1)[:-1]
            scores = [picker.options.scores(row - mx.logsumexp(row), picker.key) for row in rows]
            p = mx.softmax(mx.concatenate(scores), axis=-1)
            self.cycles.append((np.array(p), np.array(mx.stack(self.q)), np.array(drafts)))
            self.q = []
        return self.real[1](picker, model, hidden, position, history, drafts)


def expected(mode: str, cycles: list) -> dict:
    """Per depth the share of drafts kept, tokens per cycle, and what is true of all first drafts."""
    shares = [np.cumprod([kept(mode, *row) for row in zip(*cycle, strict=True)]) for cycle in cycles]
    first = [of_all_draws(p[0].astype(np.float64), q[0].astype(np.float64)) for p, q, _ in cycles]
    return {
        "acceptance": np.mean(shares, axis=0).tolist(),
        "tokens_per_cycle": 1 + float(np.mean([share.sum() for share in shares])),
        "first": {name: float(np.mean([f[name] for f in first])) for name in first[0]},
    }


def measure(model, prompts: list, seeds: int, options: dict) -> dict:
    """Per mode: stats, seconds and tokens after the first, of each seed, and what was expected."""
    stats = {mode: mlx_mtp.Stats() for mode in DRAFT_SAMPLING}
    seconds = {mode: [0.0] * seeds for mode in stats}
    tokens = {mode: [0] * seeds for mode in stats}
    for seed in range(seeds):
        for _, prompt in prompts:
            for mode in stats:
                own = mlx_mtp.Stats()
                steps = mlx_mtp.generate_step(prompt, model, seed=seed, draft_sampling=mode, stats=own, **options)
                text, elapsed = timed(token for token, _, _ in steps)
                stats[mode].add(own)
                seconds[mode][seed] += elapsed
                tokens[mode][seed] += len(text) - 1
    found = {}
    for mode, counts in stats.items():
        with Recorder() as cycles:
            for _, prompt in prompts:
                list(mlx_mtp.generate_step(prompt, model, seed=0, draft_sampling=mode, **options))
        found[mode] = {
            "cycles": counts.cycles,
            "acceptance": counts.acceptance,
            "tokens_per_cycle": counts.tokens_per_cycle,
            "seconds": seconds[mode],
            "tokens": tokens[mode],
            "expected": expected(mode, cycles),
        }
    return found


def print_table(results: dict) -> None:
    columns = ("setting", "mode", "accepted per depth", "expected", "tok/cycle", "expected", "ms/token", "vs greedy")
    table, bounds = Table(*columns), Table("setting", "first draft: p(argmax q)", "coupled", "1-TV", "(1-TV)/(1+TV)")
    for setting, modes in results.items():
        per_token = {mode: np.array(m["seconds"]) / m["tokens"] for mode, m in modes.items()}
        for mode, m in modes.items():
            rates = (percentages(part["acceptance"], decimals=1) for part in (m, m["expected"]))
            per_cycle = (f"{part['tokens_per_cycle']:.3f}" for part in (m, m["expected"]))
            ratio, milliseconds = per_token["greedy"] / per_token[mode], 1000 * np.median(per_token[mode])
            row = (*rates, *per_cycle, f"{milliseconds:.2f}", f"{np.median(ratio):.2f}x")
            table.add_row(setting, mode, *row)
        first = modes["coupled"]["expected"]["first"]
        bounds.add_row(setting, *(f"{share:.1%}" for share in first.values()))
    console = Console(width=130)
    console.print(table)
    console.print(bounds)


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HERE / "prompts.json")
@click.option("-k", default=3, show_default=True, help="Drafts per cycle.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--max-tokens", default=80, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(model: str, prompts: Path, k: int, seeds: int, max_tokens: int, out: Path | None) -> None:
    """Compare greedy and coupled drafts on one checkpoint."""
    loaded, tokenizer = mlx_mtp.load(model)
    encoded, stops = read_prompts(tokenizer, prompts), set(tokenizer.eos_token_ids)
    run = {"num_draft_tokens": k, "adaptive": False, "max_tokens": max_tokens, "stop_tokens": stops}
    for _ in mlx_mtp.generate_step(encoded[0][1], loaded, temp=1.0, **run):  # a warm-up
        pass
    results = {name: measure(loaded, encoded, seeds, {**setting, **run}) for name, setting in SETTINGS.items()}
    print_table(results)
    result = {"environment": environment(), "model": Path(model).name, "k": k, "max_tokens": max_tokens}
    line = json.dumps({**result, "results": results})
    print(line)
    if out:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
