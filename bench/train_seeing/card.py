"""The model card and the example picture of the demo that reads pictures."""

import random
from pathlib import Path

from . import scenes
from .answers import COUNT

EXAMPLE = (scenes.Thing("square", "red", "left"), scenes.Thing("circle", "blue", "right"))

CARD = """# mlx_mtp's demo that reads pictures: a tiny Qwen3.5-VL with an MTP layer

{size:.1f} million parameters: a vision tower of two blocks, two gated-delta and two full-attention layers,
and one MTP layer that also drafts behind its own drafts, with the names of the released checkpoints. It was
trained on drawn pictures of one or two coloured shapes (squares, circles and triangles) on a white ground,
and on questions about them.

    mlx-mtp generate --model demo-vision --image example.png -p "What do you see?"

    {described}.

Ask "What colour is the square?", "Where is the circle?", "How many shapes are there?", "Is there a
triangle?", or with two pictures "Compare the two pictures." Other questions and pictures get wrong answers.

Trained by `python -m bench.train_seeing.train` on a CPU: {steps} updates of 32 texts in {minutes:.0f}
minutes on one core of a busy machine. Of the tokens of the last 100 updates {model} were right, of the
drafts {depths} at depths 1 and 2. Of the answers about {count} other drawn pictures {answers} were right
in every word. Licence: MIT.
"""


def write(out: Path, *, parameters: int, steps: int, minutes: float, right: list[float], answers: int) -> None:
    """Write README.md and example.png.

    right: shares of right tokens of the model and of each depth of drafts. answers: as `right_answers` returns.
    """
    scenes.render(EXAMPLE, 128, 96, random.Random(1)).save(out / "example.png")
    model, *depths = (f"{100 * share:.0f}%" for share in right)
    text = CARD.format(
        size=parameters / 1e6,
        described=scenes.described(EXAMPLE),
        steps=steps,
        minutes=minutes,
        model=model,
        depths=" and ".join(depths),
        count=COUNT,
        answers=answers,
    )
    (out / "README.md").write_text(text)
