"""Measure the demo's predictions and drafts: teacher-forced accuracies per depth, and greedy samples."""

import random
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from tokenizers import Tokenizer

from .activations import cross_entropy
from .data import chat
from .library import Doc
from .network import DemoModel
from .tokenizer import as_text

FIRST_PROMPTS = ([{"role": "user", "content": "What does os.path.join do?"}], "def read_lines(path):")


def pack(texts: Iterable[str], tokenizer: Tokenizer, *, slots: int, extra: int) -> mx.array:
    """All whole rows [R, slots + extra] of the texts' tokens, one after another; rows overlap by `extra`."""
    ids = np.array([i for e in tokenizer.encode_batch(list(texts)) for i in e.ids], dtype=np.int32)
    starts = np.arange((len(ids) - extra) // slots)[:, None] * slots
    return mx.array(ids[starts + np.arange(slots + extra)])


def score(model: DemoModel, tokens: mx.array) -> dict[str, list[float] | float]:
    """Teacher-forced figures on rows [R, L + depths + 1].

    loss: nats per token of the trunk. accuracy: top-1 of the trunk and of each depth against the text itself.
    agreement: each depth's top-1 against the trunk's own top-1 for the same position. run: mean number of
    depths, from the first on, that agree without a gap (the drafts a cycle would accept).
    """
    depths = len(model.mtp)
    slots = tokens.shape[1] - depths - 1
    losses, hits, agreements = [], [], []
    for row in mx.split(tokens, len(tokens)):
        logits = model.all_logits(row)
        losses.append(cross_entropy(logits[0][0], row[0, 1 : 1 + slots]).mean())
        best = [x[0].argmax(axis=-1) for x in logits]
        hits.append(mx.stack([(b == row[0, 1 + i : 1 + i + slots]).mean() for i, b in enumerate(best)]))
        known = slots - depths  # slots whose later trunk predictions lie within the row
        agreements.append(mx.stack([best[1 + k][:known] == best[0][1 + k : 1 + k + known] for k in range(depths)]))
        mx.eval(losses[-1], hits[-1], agreements[-1])
    agreed = mx.concatenate(agreements, axis=1)
    return {
        "tokens": tokens.shape[0] * slots,
        "loss": mx.stack(losses).mean().item(),
        "accuracy": mx.stack(hits).mean(axis=0).tolist(),
        "agreement": agreed.mean(axis=1).tolist(),
        "run": mx.cumprod(agreed.astype(mx.float32), axis=0).sum(axis=0).mean().item(),
    }


def evaluation_sets(corpus: dict[str, list], *, taught: int = 200) -> dict[str, list[str]]:
    """Texts by name: held-out docstrings, held-out modules, a sample of the docstrings trained on."""
    rng = random.Random(0)

    def render_all(docs: list[Doc]) -> list[str]:
        return [as_text(chat(doc, rng)) for doc in docs]

    well_known = [doc for doc in corpus["docs"] if doc.fame != "other"]
    return {
        "held-out docstrings": render_all(corpus["held_docs"]),
        "held-out modules (code)": [as_text(piece) for piece in corpus["held_code"]],
        "docstrings trained on": render_all(rng.sample(well_known, min(taught, len(well_known)))),
    }


def evaluate(model: DemoModel, tokenizer: Tokenizer, corpus: dict[str, list], *, slots: int = 256) -> dict[str, dict]:
    """`score` of every evaluation set."""
    extra = len(model.mtp) + 1
    sets = evaluation_sets(corpus)
    return {name: score(model, pack(texts, tokenizer, slots=slots, extra=extra)) for name, texts in sets.items()}


def distinct_share(ids: list[int], n: int = 8) -> float:
    """Which share of the ids' n-grams is distinct: 1.0 repeats nothing, near 0 is a loop."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def held_out_prompts(corpus: dict[str, list], questions: int, heads: int) -> list[str | list[dict]]:
    """Questions about held-out docstrings (chats) and first lines of held-out functions (text)."""
    docs = corpus["held_docs"]
    code = [piece[: piece.index("\n")] for piece in corpus["held_code"] if piece.startswith("def ")]
    chosen = [docs[i * len(docs) // questions] for i in range(questions)]
    chats = [[{"role": "user", "content": f"What does {doc.name} do?"}] for doc in chosen]
    return [*chats, *(code[i * len(code) // heads] for i in range(heads))]


def greedy_samples(
    directory: Path, prompts: list[str | list[dict]], *, max_tokens: int = 120
) -> list[tuple[str, str]]:
    """(prompt, greedy continuation) pairs by plain mlx-lm in fp32; lists are chats, strings are text."""
    model, tokenizer = mlx_lm.load(str(directory))
    model.set_dtype(mx.float32)
    samples = []
    for prompt in prompts:
        ids = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        samples.append((shown, mlx_lm.generate(model, tokenizer, ids, max_tokens=max_tokens)))
    return samples
