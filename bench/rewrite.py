"""Time the rewriting of a file with one changed line: copied drafts compared with plain decoding.

    python bench/rewrite.py [--lines 300] [--rounds 12] [--tokens 2000] [--random]

The demo would answer otherwise, so each choice of its target is replaced by the next token of the expected answer, in
both loops: passes, verifies, rollbacks and costs are real. `--random` has an answer without repetitions.
Both loops run in turns; the last line is one JSON object with the median ratio within rounds.
"""

import json
import random
import statistics
import time
from typing import Any
from unittest import mock

import click
import mlx.core as mx

import mlx_mtp
from mlx_mtp.bench.result import environment
from mlx_mtp.bench.timing import interleaved
from mlx_mtp.decoding import step
from mlx_mtp.demo import demo_path

NAMES = ("count", "total", "value", "name", "path", "text", "line", "size", "index", "item", "left", "right")


def source(lines: int) -> list[str]:
    """Make a file of different lines, the same in every run."""
    rng = random.Random(0)
    made = []
    for i in range(lines):
        a, b, c = rng.sample(NAMES, 3)
        made.append(f"def {a}_{i}({b}, {c}):" if i % 4 == 0 else f"    {a} = {b}[{rng.randrange(99)}] + {c}({i})")
    return made


def scripted(model: Any, prompt: list[int], answer: list[int], **options: Any) -> tuple[list[int], float, Any]:
    """Decode `answer` as if the target had chosen it; return tokens, seconds from the first token on, and counts."""
    whole, real = mx.array([*prompt, *answer, *[0] * 32], mx.int32), step.pick

    def pick(model, hidden, position, drafts, members, *masks):
        tokens, logprobs = real(model, hidden, position, drafts, members, *masks)
        expected = mx.take(whole, position + mx.arange(tokens.shape[1]))[None]
        return mx.where(tokens < 0, tokens, expected), logprobs  # the target's own choice is computed as well

    stats = mlx_mtp.Stats()
    with mock.patch.object(step, "pick", pick), mock.patch("mlx_mtp.decoding.prefill.pick", pick):
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=len(answer), stats=stats, **options)
        found = [next(steps)[0]]
        tic = time.perf_counter()
        found += [token for token, *_ in steps]
    return found, time.perf_counter() - tic, stats


@click.command(help=__doc__)
@click.option("--lines", default=300, show_default=True)
@click.option("--rounds", default=12, show_default=True)
@click.option("--tokens", default=2000, show_default=True, help="Maximum tokens of the answer.")
@click.option("--random", "unlike", is_flag=True, help="An answer of random tokens, without repetitions.")
def main(lines: int, rounds: int, tokens: int, unlike: bool) -> None:
    model, tokenizer = mlx_mtp.load(demo_path())
    file = source(lines)
    prompt = tokenizer.encode("Rewrite this file, with one change.\n" + "\n".join(file) + "\n")
    changed = [*file[: lines // 2], "    raise ValueError(name)", *file[lines // 2 + 1 :]]
    answer = tokenizer.encode("\n".join(changed))[:tokens]
    if unlike:
        rng = random.Random(1)
        answer = [rng.randrange(model.vocab_size) for _ in answer]
    turns = {
        "plain": lambda: scripted(model, prompt, answer, num_draft_tokens=0),
        "copied": lambda: scripted(model, prompt, answer),
    }
    found = interleaved(turns, rounds)
    assert all(text == answer for runs in found.values() for text, *_ in runs), "texts differ"
    pairs = [(a[1], b[1]) for a, b in zip(found["plain"], found["copied"], strict=True)]
    ratio = statistics.median(plain / copied for plain, copied in pairs)
    stats = found["copied"][-1][2]
    print(f"{len(prompt)} tokens of prompt, {len(answer)} of answer: {ratio:.2f}x of plain decoding")
    counts = {"cycles": stats.cycles, "lookups": stats.lookups, "copied": stats.lookup_accepted}
    print(json.dumps({"environment": environment(), "ratio": ratio, "seconds": pairs, **counts}))


if __name__ == "__main__":
    main()
