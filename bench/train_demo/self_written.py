"""Text generated greedily by the trained trunk, on which the MTP depths are trained."""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import batch_generate
from tokenizers import Tokenizer

from .data import QUESTIONS, chat
from .evaluate import distinct_share
from .tokenizer import TURN_START, as_text, render

PROCESSES = 2
BATCH = 256
LEAST_DISTINCT = 0.8  # minimum share of distinct 8-grams, to avoid training on repetitions


def prompts(corpus: dict[str, list], rng: random.Random) -> Iterator[str]:
    """Without end: questions and the first tokens of code, as in training and about names that do not exist."""
    docs, heads = corpus["docs"], [p.partition("\n")[0] for p in corpus["code"] if p.startswith(("def ", "class "))]
    while True:
        doc, other = rng.choice(docs), rng.choice(docs)
        invented = f"{doc.name.rpartition('.')[0] or doc.name}.{other.name.rpartition('.')[2]}"
        name = doc.name if rng.random() < 0.3 else invented
        question = [{"role": "user", "content": rng.choice(QUESTIONS).format(name)}]
        turns = question if rng.random() < 0.8 else chat(other, rng) + question
        yield render(turns) + f"{TURN_START}assistant\n"
        head, another = rng.choice(heads), rng.choice(heads)
        yield f"{head.partition('(')[0]}({another.partition('(')[2] or 'object):'}\n"
        code = rng.choice(corpus["code"])
        yield code[: rng.randrange(min(len(code), 600)) + 20]


def _continue(directory: Path, ids: list[list[int]], max_tokens: int) -> list[list[int]]:
    mx.set_default_device(mx.cpu)
    model, tokenizer = mlx_lm.load(str(directory))
    model.set_dtype(mx.float32)
    response = batch_generate(
        model,
        tokenizer,
        ids,
        max_tokens=max_tokens,
        return_token_ids=True,
        completion_batch_size=BATCH,
        prefill_batch_size=BATCH,
    )
    return response.token_ids


def write(
    directory: Path, tokenizer: Tokenizer, corpus: dict[str, list], *, seed: int, count: int, max_tokens: int = 128
) -> list[list[int]]:
    """Token ids of `count` prompts with the saved trunk's greedy continuations, those that only repeat left out."""
    stream = prompts(corpus, random.Random(seed))
    ids = [e.ids[-200:] for e in tokenizer.encode_batch([next(stream) for _ in range(count)])]
    shares = [ids[i::PROCESSES] for i in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        written = pool.map(_continue, [directory] * PROCESSES, shares, [max_tokens] * PROCESSES)
    end = tokenizer.encode(as_text("")).ids
    documents = []
    for prompt_ids, answers in zip(shares, written, strict=True):
        for prompt, answer in zip(prompt_ids, answers, strict=True):
            if distinct_share(answer) >= LEAST_DISTINCT:
                documents.append(prompt + answer + end)
    return documents
