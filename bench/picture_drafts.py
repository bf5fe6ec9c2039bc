"""Measure what MTP heads should read at rows of pictures: the next row's feature, or the mark's embedding.

    python bench/picture_drafts.py [--count 100]

Answers of the demo that reads pictures about drawn scenes, with one draft in each cycle. The text is the same either
way; only the share of accepted drafts may differ. Needs the extra `vision`.
"""

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click

import mlx_mtp
from mlx_mtp.decoding import picture_rows

sys.path.append(str(Path(__file__).parent))

from train_seeing import scenes


class Accepted(NamedTuple):
    """Numbers of drafts and of accepted ones in all answers, and the answers."""

    drafted: int
    accepted: int
    texts: list[str]


def accepted(demo: tuple[Any, Any], *, count: int, features: bool, seed: int = 0) -> Accepted:
    """Return the drafts of answers to `count` questions about drawn pictures.

    features: the heads read features at the rows of pictures; otherwise the embedding of the mark.
    """
    model, tokenizer = demo
    rng, drafted, right, texts = random.Random(seed), 0, 0, []
    known = picture_rows._stored if features else lambda model, cache, place: None
    for _ in range(count):
        image, question, _ = scenes.draw_question(rng)
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        with mock.patch.object(picture_rows, "_stored", known):
            stats = mlx_mtp.Stats()
            options = {"num_draft_tokens": 1, "adaptive": False, "prompt_lookup": False, "stats": stats}
            texts.append(mlx_mtp.generate(model, tokenizer, prompt, images=[image], max_tokens=60, **options))
        drafted, right = drafted + sum(stats.drafted), right + sum(stats.accepted)
    return Accepted(drafted, right, texts)


@click.command()
@click.option("--count", default=100, show_default=True, help="Number of pictures.")
def main(count: int) -> None:
    """Print the accepted share of one draft per cycle, by what the heads read at rows of pictures."""
    demo = mlx_mtp.load("demo-vision")
    for name, features in (("features", True), ("marks", False)):
        found = accepted(demo, count=count, features=features)
        click.echo(
            f"{name}: {found.accepted} of {found.drafted} drafts accepted, {found.accepted / found.drafted:.1%}"
        )


if __name__ == "__main__":
    main()
