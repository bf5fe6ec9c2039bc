"""Count the answers of the demo that reads pictures which are right in every word."""

import random
from pathlib import Path

import mlx_mtp

from . import scenes

COUNT, SEED = 100, "answers"  # of drawn pictures; training draws none with this seed


def right_answers(checkpoint: str | Path, count: int = COUNT) -> int:
    """Return the number of right answers to a question about each of `count` drawn pictures."""
    model, tokenizer = mlx_mtp.load(checkpoint)
    rng, right = random.Random(SEED), 0
    for _ in range(count):
        image, question, answer = scenes.draw_question(rng)
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        text = mlx_mtp.generate(model, tokenizer, prompt, images=[image], max_tokens=60)
        right += text.strip() == answer
    return right
