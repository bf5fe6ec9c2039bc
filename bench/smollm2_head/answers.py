"""Write SmolLM2's answers with MLX, on one core of a CPU: prompts and completions for `mlx-mtp tune-heads --data`.

    python -m bench.smollm2_head.answers --model DIR --tokens N --seed 0 --out FILE.jsonl

Half of the prompts are made of the templates and topics of `prompts`, without the held-out topics and the test
questions; the others the model samples behind its chat template. Of four groups of answers three are greedy, the
fourth is sampled at temperature 0.8. For each further core run a process with another seed.
"""

import json
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

import mlx_mtp
from mlx_mtp.training.texts import MARK, chat_tokens, own_prompts

from .prompts import TEST_QUESTIONS, draw

LENGTH = 512  # maximum tokens of prompt and answer
DRAWN = 20_000  # prompts to draw of the templates
GROUP, ROWS = 96, 48  # answers of a call, and sequences that decode at once
SAMPLED = 4  # one group in this number


def prompts(model: Any, tokenizer: Any, seed: int) -> Iterator[str]:
    """Yield prompts, one of the templates and one of the model's own in turn; none is a test question."""
    rendered = tokenizer.apply_chat_template([question(MARK)], tokenize=False, add_generation_prompt=True)
    before, _, after = rendered.partition(MARK)
    own = (tokenizer.decode(tokens) for tokens in own_prompts(model, tokenizer, LENGTH, seed))
    messages = (text.removeprefix(before).removesuffix(after) for text in own)
    pairs = zip(draw(DRAWN, TEST_QUESTIONS, seed, held_out=False), messages, strict=False)
    return (prompt for prompt in chain.from_iterable(pairs) if prompt not in TEST_QUESTIONS)


def question(content: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": content}


def conversations(model: Any, tokenizer: Any, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Yield prompts with the tokens of the model's answers."""
    rest = prompts(model, tokenizer, seed)
    for wave in count():
        asked = list(islice(rest, GROUP))
        if not asked:
            return
        tokens = [chat_tokens(tokenizer, [question(prompt)]) for prompt in asked]
        mx.random.seed(seed + wave)
        sampled: dict[str, Any] = {"sampler": make_sampler(temp=0.8)} if wave % SAMPLED == SAMPLED - 1 else {}
        limits = [LENGTH - len(prompt) for prompt in tokens]
        options: dict[str, Any] = {"max_tokens": limits, "completion_batch_size": ROWS, **sampled}
        found = mlx_mtp.batch_generate(model, tokenizer, tokens, return_token_ids=True, **options)
        yield from zip(asked, found.token_ids or [], strict=True)


@click.command()
@click.option("--model", required=True, help="Directory of SmolLM2-135M-Instruct in float32.")
@click.option("--tokens", default=200_000, show_default=True, help="Tokens of answers to write.")
@click.option("--seed", default=0, show_default=True, help="Of prompts and samples.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="*.jsonl file.")
def main(model: str, tokens: int, seed: int, out: Path) -> None:
    """Write answers until there are enough tokens."""
    target, tokenizer = mlx_mtp.load(model, kernels="off", mtp=False)
    written = 0
    with out.open("w") as file:
        for prompt, answer in conversations(target, tokenizer, seed):
            file.write(json.dumps({"prompt": prompt, "completion": tokenizer.decode(answer)}) + "\n")
            file.flush()
            written += len(answer)
            if written >= tokens:
                break


if __name__ == "__main__":
    main()
