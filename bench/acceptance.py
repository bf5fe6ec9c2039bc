"""Count what the exact cache rule is worth: acceptance per depth with it, and with the usual approximation.

    python bench/acceptance.py [--model DIR] [--max-tokens 200]

Exact: a slot that a head filled from drafted tokens is filled again when the true ones are known. The approximation
never goes back: what a draft wrote stays, right or wrong. Same prompts, same texts, k = all heads.

The second table: where heads have windows, how many of the last rows of a prompt they read before they draft; of the
tokens right behind it, where that matters most.

These are counts, not times: they do not depend on the machine's speed. The last line is one JSON object.
"""

import json
from pathlib import Path
from unittest import mock

import click
import mlx.core as mx
from decode import HERE, read_prompts
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench.result import environment
from mlx_mtp.bench.subject import make_prompts
from mlx_mtp.cache import prompt_cache
from mlx_mtp.decoding.draft_sampling import Choosers, HeadOutput, joined
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.run import Drafts, Run
from mlx_mtp.decoding.summary import percentages
from mlx_mtp.demo import demo_path

LONG, FIRST = 500, 40  # tokens of the second table's prompts, and behind them


class NeverRevisits(Heads):
    """Depth j starts behind the j slots that it filled from drafts in the last cycle."""

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        model, cache, choose = frame.model, frame.cache, Choosers(frame.members)
        rows, base, accepted = run.size, cache.heads[0].offset, run.last
        tokens, hidden, kept = run.tokens, model.capture(run.hidden), []
        first, choices = cache.layers[0].offset + 1, []
        for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=True)):
            kv.seek(base + depth, kv.limit + depth)
            output = head(model.embed(tokens[:, depth : rows + depth], depth), hidden[:, depth : rows + depth], kv)
            answer = mx.take(output, accepted, axis=1)  # row `accepted` + depth of the exact rule
            choices.append(choose(HeadOutput(model, depth, answer), first + depth))
            longer = mx.concatenate([tokens, choices[-1].token], axis=1)
            tokens = mx.where(mx.arange(longer.shape[1]) == accepted + depth + 1, choices[-1].token, longer)
            if depth + 1 < len(cache.heads):
                # Rows of the next depth count from the same position, one slot later.
                skipped = mx.zeros_like(hidden[:, : depth + 1])
                hidden = mx.concatenate([skipped, head.feedback(output, hidden)], axis=1)
                kept.append(mx.take(output, accepted, axis=1))
        cache.kept = kept
        cache.heads_follow()
        return Drafts(*joined(choices[:k]))


def measure(model, prompts: list, stops: set[int], n: int, drafter: Heads) -> tuple[dict, list]:
    """Stats per category with a drafter, and the texts."""
    counts: dict[str, mlx_mtp.Stats] = {}
    texts = []
    model.drafter = drafter
    for category, prompt in prompts:
        stats = mlx_mtp.Stats()
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, stop_tokens=stops, stats=stats, adaptive=False)
        texts.append([token for token, _, _ in steps])
        for name in (category, "all"):
            counts.setdefault(name, mlx_mtp.Stats()).add(stats)
    model.drafter = None
    return counts, texts


def behind_long_prompts(model, tokenizer) -> dict[int, mlx_mtp.Stats]:
    """Stats of the first tokens, by the rows that heads read at first; all their windows see at the end."""
    prompts = make_prompts(tokenizer, model.vocab_size, each=4, context=LONG)
    found: dict[int, mlx_mtp.Stats] = {}
    for rows in (4, 8, 16, prompt_cache.AT_FIRST, LONG):
        found[rows] = mlx_mtp.Stats()
        with mock.patch.object(prompt_cache, "AT_FIRST", rows):
            for prompt in prompts:
                stats = mlx_mtp.Stats()
                list(mlx_mtp.generate_step(prompt.tokens, model, max_tokens=FIRST, adaptive=False, stats=stats))
                found[rows].add(stats)
    return found


@click.command()
@click.option("--model", default=str(demo_path()), help="Local checkpoint directory.  [default: the demo]")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HERE / "prompts.json")
@click.option("--max-tokens", default=200, show_default=True)
def main(model: str, prompts: Path, max_tokens: int) -> None:
    """Acceptance per depth by the exact rule and by the approximation."""
    loaded, tokenizer = mlx_mtp.load(model)
    encoded = read_prompts(tokenizer, prompts)
    rules = {"exact": Heads(loaded), "never revisits": NeverRevisits(loaded)}
    stops = set(tokenizer.eos_token_ids)
    results, texts = {}, []
    for name, rule in rules.items():
        results[name], text = measure(loaded, encoded, stops, max_tokens, rule)
        texts.append(text)
    if texts[0] != texts[1]:
        raise SystemExit("the two rules wrote different texts")
    table = Table("prompts", "rule", "cycles", "accepted per depth", "tok/cycle")
    for category in results["exact"]:
        for name, counts in results.items():
            stats = counts[category]
            rates = percentages(stats.by_depth, decimals=1)
            table.add_row(category, name, str(stats.cycles), rates, f"{stats.tokens_per_cycle:.3f}")
    Console(width=110).print(table)
    if all(loaded.head_windows()):
        table = Table("rows read at first", "cycles", "accepted per depth", "tok/cycle")
        results["rows at first"] = behind_long_prompts(loaded, tokenizer)
        for rows, stats in results["rows at first"].items():
            rates = percentages(stats.by_depth, decimals=1)
            table.add_row(str(rows), str(stats.cycles), rates, f"{stats.tokens_per_cycle:.3f}")
        Console(width=110).print(table)
    figures = {
        name: {category: [stats.cycles, stats.accepted] for category, stats in counts.items()}
        for name, counts in results.items()
    }
    print(json.dumps({"environment": environment(), "cycles_and_accepted": figures}))


if __name__ == "__main__":
    main()
