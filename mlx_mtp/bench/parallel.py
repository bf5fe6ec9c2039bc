"""Time several sequences: mlx-lm's batches, ours without and with drafts, and our loop on one after the other.

Ours build each cycle or replay recorded ones. All take turns on the same prompts. A speed is tokens over the time
that is not prefill. A gap is the time between two arrivals of a sequence, each of which may bring several tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mlx_lm.generate import BatchGenerator as MlxLmBatchGenerator
from rich.table import Table

from ..batch.generator import BatchGenerator
from ..generate import generate_step
from ..machine.errors import first_line
from .decode import twin
from .result import named, new_table
from .subject import BenchPrompt, Subject
from .timing import interleaved, ratio

MLX_LM, PLAIN, DRAFTED, AFTER = "mlx-lm", "plain", "drafted", "one after the other"
REPLAYED = ", replayed"
TEXTS = (1, 2, 4, 8)
CONTEXTS = (0, 4096)  # unpadded prompts, and long ones


@dataclass(frozen=True)
class BatchRun:
    """A run of several sequences: tokens of each, seconds without prefill, gaps between arrivals in seconds."""

    tokens: list[list[int]]
    seconds: float
    gaps: list[float]


def contenders(
    subject: Subject, step: int, *, replayed: bool = False
) -> tuple[dict[str, Callable[..., BatchRun]], str | None]:
    """Return the contenders that can run this model, as functions of prompts and a length, and why mlx-lm cannot.

    The reason is None if mlx-lm can. step: prompt tokens per prefill chunk. replayed: include ours both with built
    and with replayed cycles; otherwise in its default mode.
    """
    model = subject.model
    found: dict[str, Callable[..., BatchRun]] = {}
    missing = None
    try:
        theirs = twin(model)
        found[MLX_LM] = partial(_batch, partial(MlxLmBatchGenerator, theirs, prefill_step_size=step))
    except ValueError as e:
        missing = first_line(e)
    drafts: dict[str, dict[str, Any]] = {PLAIN: {"num_draft_tokens": 0}}
    if model.max_draft_tokens:
        drafts[DRAFTED] = {}
    for replays in (False, True) if replayed else (None,):
        for name, options in drafts.items():
            ours = partial(BatchGenerator, model, prefill_step_size=step, compile_cycles=replays, **options)
            found[name + REPLAYED * bool(replays)] = partial(_batch, ours)
    found[AFTER] = partial(_one_by_one, model, step)
    return found, missing


def _batch(make: Callable[[], Any], prompts: Sequence[list[int]], length: int) -> BatchRun:
    """Run a batch on the generator that `make` returns, ours or mlx-lm's; both have the same interface."""
    batch = make()
    uids = batch.insert([list(prompt) for prompt in prompts], [length] * len(prompts))
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    arrived: dict[int, list[float]] = {uid: [] for uid in uids}
    with batch.stats() as stats:
        while responses := batch.next_generated():
            now = time.perf_counter()
            for response in responses:
                tokens[response.uid].append(response.token)
            for uid in {response.uid for response in responses}:
                arrived[uid].append(now)
    batch.close()
    gaps = [gap for times in arrived.values() for gap in np.diff(times).tolist()]
    return BatchRun(list(tokens.values()), stats.generation_time, gaps)


def _one_by_one(model: Any, step: int, prompts: Sequence[list[int]], length: int) -> BatchRun:
    texts, seconds, gaps = [], 0.0, []
    for prompt in prompts:
        steps = generate_step(prompt, model, max_tokens=length, prefill_step_size=step)
        tokens, times = zip(*((token, time.perf_counter()) for token, *_ in steps), strict=True)
        seconds += times[-1] - times[0]
        gaps += np.diff(times).tolist()
        texts.append(list(tokens))
    return BatchRun(texts, seconds, gaps)


def measure(
    running: dict[str, Callable[..., BatchRun]],
    prompts: Sequence[BenchPrompt],
    texts: int,
    length: int,
    *,
    drawn: bool = False,
    **turns_of: Any,
) -> Iterator[dict[str, Any]]:
    """Time `texts` sequences of `length` tokens each; yield an entry per contender with values by round.

    The sequences' prompts are taken evenly from `prompts`, and repeat if there are fewer.
    differs: number of sequences, of all rounds, that differ from our loop's. drawn: acceptance is drawn at random, so
    texts have no meaning and are not compared. turns_of: of `interleaved`, such as rounds.
    """
    chosen = [prompts[i * len(prompts) // texts].tokens for i in range(texts)]
    found = interleaved({name: partial(run, chosen, length) for name, run in running.items()}, **turns_of)
    expected = found[AFTER][0].tokens
    for name, runs in found.items():
        unlike = sum(a != b for run in runs for a, b in zip(run.tokens, expected, strict=True))
        yield {
            "contender": name,
            "texts": texts,
            "context": prompts[0].context,
            "tokens": [sum(map(len, run.tokens)) for run in runs],
            "seconds": [run.seconds for run in runs],
            "gaps": {str(p): [float(np.percentile(run.gaps, p)) for run in runs] for p in (50, 95, 99)},
            "differs": None if drawn else unlike,
        }


def table(found: dict[str, Any]) -> Table:
    """Return a table of a result: tok/s together and of each sequence, ratio to mlx-lm (else our loop), and gaps.

    Speeds are the highest and gaps the lowest of all rounds, ratios the median.
    """
    base = MLX_LM if any(e["contender"] == MLX_LM for e in found["entries"]) else AFTER
    columns = ("texts", "context", "", "tok/s together", "of one", f"x {base}", "gap p50", "p95", "p99 ms", "differ")
    made = new_table(f"{named(found['model'])}, {found['options']['max_tokens']} tokens each", *columns)
    for e in found["entries"]:
        same = [b for b in found["entries"] if (b["texts"], b["context"]) == (e["texts"], e["context"])]
        reference = next(b for b in same if b["contender"] == base)
        speeds, others = _speeds(e), _speeds(reference)
        fastest = max(speeds)
        share = fastest / (1 if e["contender"] == AFTER else e["texts"])
        gaps = [f"{1000 * min(e['gaps'][p]):.1f}" for p in ("50", "95", "99")]
        cells = e["texts"], e["context"] or "", e["contender"], f"{fastest:.0f}", f"{share:.0f}"
        differ = "" if e["differs"] is None else str(e["differs"])
        made.add_row(*map(str, cells), str(ratio(speeds, others)), *gaps, differ)
    return made


def _speeds(entry: dict[str, Any]) -> list[float]:
    return [tokens / seconds for tokens, seconds in zip(entry["tokens"], entry["seconds"], strict=True)]
