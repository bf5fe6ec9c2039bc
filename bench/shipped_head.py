"""Time SmolLM2's answers with the head in this package against plain decoding, answer by answer.

    mlx-mtp pull smollm2
    mlx-mtp convert --hf-path smollm2 -d --dtype float32 --mlx-path DIR
    python bench/shipped_head.py --model DIR [--answers 20] [--max-tokens 200]

Each of the questions, on which no head was trained (`bench/smollm2_head/prompts.json`), is answered twice, greedily:
without drafts and with the default flags, in random order. Texts have to be equal. A speed is the number of tokens
over the time from the first one on; shown are the median of the ratios with its 95% interval, from a seeded bootstrap
over the answers, and their quartiles.
"""

import json
import random
import time
from typing import Any, NamedTuple

import click
from decode import HERE
from plain import ratio_of

import mlx_mtp


class Answer(NamedTuple):
    """The tokens of an answer, its seconds a token, and its statistics."""

    tokens: list[int]
    pace: float
    stats: mlx_mtp.Stats


def answer(model: Any, tokenizer: Any, question: str, max_tokens: int, drafts: int | None) -> Answer:
    """Return an answer of the model. drafts: maximum drafts of a cycle; None for the default flags."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    tokens, began, stats = list[int](), 0.0, mlx_mtp.Stats()
    options: dict[str, Any] = {"max_tokens": max_tokens, "num_draft_tokens": drafts, "stats": stats}
    options["stop_tokens"] = tokenizer.eos_token_ids
    for token, *_ in mlx_mtp.generate_step(prompt, model, **options):
        began = began or time.perf_counter()
        tokens.append(token)
    return Answer(tokens, (time.perf_counter() - began) / max(1, len(tokens) - 1), stats)


@click.command()
@click.option("--model", required=True, help="Directory of SmolLM2-135M-Instruct in float32.")
@click.option("--answers", default=20, show_default=True, type=click.IntRange(2, 20))
@click.option("--max-tokens", default=200, show_default=True)
def main(model: str, answers: int, max_tokens: int) -> None:
    """Compare the default flags with plain decoding on the test questions."""
    questions = json.loads((HERE / "smollm2_head" / "prompts.json").read_text())["test_questions"][:answers]
    target, tokenizer = mlx_mtp.load(model)
    order, ratios = random.Random(0), list[float]()
    cycles = tokens = drafted = right = 0
    for drafts in (0, None):
        answer(target, tokenizer, "Hello! Who are you?", max_tokens, drafts)
    for question in questions:
        found = {
            drafts: answer(target, tokenizer, question, max_tokens, drafts) for drafts in order.sample((0, None), 2)
        }
        assert found[0].tokens == found[None].tokens, question
        stats = found[None].stats
        ratios.append(found[0].pace / found[None].pace)
        cycles, tokens = cycles + stats.cycles, tokens + stats.generation_tokens
        drafted, right = drafted + sum(stats.drafted[:1]), right + sum(stats.accepted[:1])
        click.echo(f"{ratios[-1]:.2f}x, {len(found[0].tokens)} tokens: {question}")
    click.echo(f"over plain decoding: {ratio_of(ratios)}; {tokens / cycles:.2f} tokens per cycle; ", nl=False)
    click.echo(f"{right} of {drafted} first drafts of the head accepted")


if __name__ == "__main__":
    main()
