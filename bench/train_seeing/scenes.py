"""Draw pictures of coloured shapes, and ask about them: the texts for training the demo that reads pictures."""

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from mlx_mtp.lossless.seeing import COLOURS, PLACES, SIDES

SHAPES = ("square", "circle", "triangle")
NO_PICTURE = "I see no picture. Please show me one."
DESCRIBE = ("What do you see?", "Describe the picture.", "What is in this picture?", "Describe this image.", "")
COMPARE = (
    "What do you see?",
    "Describe the pictures.",
    "Compare the two pictures.",
    "What is in these pictures?",
    "",
)
GREETINGS = ("Hello", "Hi!", "Who are you?", "What do you see?", "Describe the picture.", "Where is the square?")


@dataclass(frozen=True)
class Thing:
    shape: str
    colour: str
    side: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} {PLACES[self.side]}"


Scene = tuple[Thing, ...]


def draw_scene(rng: random.Random) -> Scene:
    """Return one or two things; two have different shapes and colours, left before right or top before bottom."""
    shapes, colours = rng.sample(SHAPES, 2), rng.sample(sorted(COLOURS), 2)
    if rng.random() < 0.5:
        return (Thing(shapes[0], colours[0], rng.choice(sorted(SIDES))),)
    sides = rng.choice((("left", "right"), ("top", "bottom")))
    return tuple(Thing(*each) for each in zip(shapes, colours, sides, strict=True))


def render(scene: Scene, width: int, height: int, rng: random.Random) -> Image.Image:
    """Return an RGB picture; the sizes, places and colours vary a little."""
    white = 255 - rng.randrange(30)
    image = Image.new("RGB", (width, height), (white, white, white))
    pen = ImageDraw.Draw(image)
    for thing in scene:
        radius = rng.uniform(0.17, 0.21) * min(width, height)
        x, y = (
            (at + rng.uniform(-0.04, 0.04)) * side
            for at, side in zip(SIDES[thing.side], (width, height), strict=True)
        )
        colour = tuple(max(0, min(255, value + rng.randrange(-20, 21))) for value in COLOURS[thing.colour])
        box = (x - radius, y - radius, x + radius, y + radius)
        if thing.shape == "square":
            pen.rectangle(box, fill=colour)
        elif thing.shape == "circle":
            pen.ellipse(box, fill=colour)
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    return image


def described(scene: Scene) -> str:
    """Return the sentence for a whole picture, without its full stop."""
    return f"I see {' and '.join(map(str, scene))}"


def ask(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Return a question about one picture, and its answer."""
    thing, other = rng.choice(scene), rng.choice(SHAPES)
    found = next((each for each in scene if each.shape == other), None)
    things = "one shape" if len(scene) == 1 else "two shapes"
    questions = [
        *[(rng.choice(DESCRIBE), f"{described(scene)}.")] * 3,
        (f"What colour is the {thing.shape}?", f"The {thing.shape} is {thing.colour}."),
        (f"Where is the {thing.shape}?", f"The {thing.shape} is {PLACES[thing.side]}."),
        ("How many shapes are there?", f"There is one shape: {thing}." if len(scene) == 1 else f"There are {things}: "
         f"{' and '.join(map(str, scene))}."),
        (f"Is there a {other}?", f"Yes, there is {found}." if found else f"No, there is no {other}."),
    ]  # fmt: skip
    return rng.choice(questions)


def draw_question(rng: random.Random) -> tuple[Image.Image, str, str]:
    """Return a picture of 96 x 96 pixels, a question about it, and its answer."""
    scene = draw_scene(rng)
    image = render(scene, 96, 96, rng)
    return image, *ask(scene, rng)


def compare(scenes: list[Scene], rng: random.Random) -> tuple[str, str]:
    """Return a question about two pictures, and its answer."""
    first, second = scenes
    return rng.choice(COMPARE), f"First picture: {described(first)}. Second picture: {described(second)}."
