"""Time one sequence in a pool relative to the loop for one sequence, which uses exact slices while it does not draft.

    python bench/pool_of_one.py [--rounds 5] [--tokens 500 --tokens 2000] [--k 0 --k 3]

Both decode the same text with a fixed number of drafts, in turns; CPU seconds of the process (time.process_time) per
token, and the median ratio within rounds. The last line is one JSON object.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any
from unittest import mock

import click
import mlx.core as mx

import mlx_mtp
from mlx_mtp.bench.result import environment
from mlx_mtp.bench.timing import interleaved
from mlx_mtp.decoding import driver
from mlx_mtp.demo import demo_path

PROMPT = "def read_lines(path):\n"


def pooled(model: Any, prompt: list[int], tokens: int, k: int) -> list[int]:
    opened = partialmethod(driver.Driver.open, pool=True)
    with mock.patch.object(driver.Driver, "open", opened), mock.patch.object(driver, "CALM", 1 << 60):
        batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=k, adaptive=False)
        batch.insert([prompt], [tokens])
        found = []
        while responses := batch.next_generated():
            found += [response.token for response in responses]
    return found


def alone(model: Any, prompt: list[int], tokens: int, k: int) -> list[int]:
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=tokens, num_draft_tokens=k, adaptive=False)
    return [token for token, *_ in steps]


def timed(decode: Callable[..., list[int]], *args: object) -> tuple[list[int], float]:
    tic = time.process_time()
    found = decode(*args)
    return found, time.process_time() - tic


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.option("--tokens", "lengths", multiple=True, type=int, default=(500, 2000), show_default=True)
@click.option("--k", "ks", multiple=True, type=int, default=(0, 3), show_default=True)
def main(rounds: int, lengths: tuple[int, ...], ks: tuple[int, ...]) -> None:
    model, tokenizer = mlx_mtp.load(demo_path())
    model.set_dtype(mx.float32)  # in which texts of any length are the same
    prompt, results = tokenizer.encode(PROMPT), []
    for tokens in lengths:
        for k in ks:
            args = model, prompt, tokens, k
            turns = {"loop": lambda a=args: timed(alone, *a), "pool": lambda a=args: timed(pooled, *a)}
            found = interleaved(turns, rounds)
            assert len({tuple(text) for runs in found.values() for text, _ in runs}) == 1, "texts differ"
            pairs = list(zip(*([seconds for _, seconds in found[name]] for name in turns), strict=True))
            ratio = statistics.median(pool / loop for loop, pool in pairs)
            results.append({"tokens": tokens, "k": k, "pool_over_loop": ratio, "seconds": pairs})
            print(f"{tokens} tokens, k={k}: a pool of one takes {ratio:.3f} of the loop's CPU seconds")
    print(json.dumps({"environment": environment(), "results": results}))


if __name__ == "__main__":
    main()
