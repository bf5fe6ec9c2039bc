"""Open the pictures that a caller gives with a prompt, scale them to fit a box, and put them into the prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .image import LIMITS, Image, PictureLimits, numbered, open_image
from .library import is_pillow, pillow
from .rows import Picture, pictures_as_json, pictures_from_json, place
from .vision import Vision, vision_of


def as_list(images: Any) -> list[Any]:
    """Return [] for None, [images] for one picture (as in `opened`), else the list of the iterable `images`."""
    if images is None:
        return []
    single: Any = (str, Path, bytes, bytearray, memoryview, Picture, Image)
    return [images] if isinstance(images, single) or is_pillow(images) else list(images)


def opened(model: Any, images: Any, resize_shape: Any = None) -> list[Picture]:
    """Return a list of the pictures of a prompt for a model; [] without images, for any model.

    images: one or several sources of `open_image`, `Image`s, or `Picture`s, which are returned unchanged; None is no
    image. resize_shape: (width, height) in pixels, or one number for both: each image is scaled down or up to fit
    into that, with its ratio kept. Raises ValueError if there are images and the model reads none, for an image that
    cannot be opened, and for another resize_shape. On several ranks, rank 0 opens them; on the others the pictures
    have no images.
    """
    sources = as_list(images)
    if not sources:
        return []
    vision, box = vision_of(model), _box(resize_shape)
    return _from_rank_0(model.ranks, vision, sources, box) if model.ranks else _opened(vision, sources, box)


def _from_rank_0(ranks: Any, vision: Vision, sources: list[Any], box: tuple[int, int] | None) -> list[Picture]:
    """Return on all ranks the pictures that rank 0 opens, on the others without images; all raise its ValueError."""
    pictures, sent = [], None
    if not ranks.rank:
        try:
            pictures = _opened(vision, sources, box)
            sent = pictures_as_json(pictures)
        except ValueError as e:
            sent = str(e)
    sent = ranks.broadcast(sent)
    if isinstance(sent, str):
        raise ValueError(sent)
    return pictures or [*pictures_from_json(sent)]


def _opened(vision: Vision, sources: list[Any], box: tuple[int, int] | None) -> list[Picture]:
    found = []
    for number, source in enumerate(sources, 1):
        if not isinstance(source, Picture):
            image = source if isinstance(source, Image) else open_image(source, vision.limits, number)
            if box is not None:
                image = fitted(image, box, enlarge=True, limits=vision.limits, number=number)
            source = vision.picture(image)
        found.append(source)
    return found


def with_pictures(vision: Vision, tokens: Sequence[int], pictures: Sequence[Picture], start: int = 0) -> list[int]:
    """Return a prompt's tokens in which each `vision.mark` is replaced by the tokens of the next picture.

    If there is no mark, all pictures are inserted after the first `start` tokens, each with the tokens around it that
    a chat template writes (`vision.written`). Raises ValueError if there are marks, but not one for each picture.
    """
    tokens = list(tokens)
    if vision.mark not in tokens:
        tokens[start:start] = [*vision.written] * len(pictures)
    return place(tokens, pictures, vision.mark)


def _box(resize_shape: Any) -> tuple[int, int] | None:
    """Return (height, width) of a `resize_shape` of `opened`, None for None; ValueError for any other value."""
    if resize_shape is None:
        return None
    numbers = list(resize_shape) if isinstance(resize_shape, (list, tuple)) else [resize_shape]
    numbers = numbers * 2 if len(numbers) == 1 else numbers
    if len(numbers) != 2 or not all(type(number) is int and 1 <= number <= 1 << 16 for number in numbers):
        raise ValueError(f"resize_shape={resize_shape!r}: expected a number or (width, height), 1 to 65,536 pixels")
    return numbers[1], numbers[0]


def fitted_size(
    height: int, width: int, box: tuple[int, int], *, enlarge: bool = False, ratio: int = LIMITS.ratio
) -> tuple[int, int]:
    """Return the (height, width) in pixels of the largest picture of the same ratio that fits into a box.

    The side that does not fill the box is rounded down, but to at least 1, and to at least the other side divided by
    `ratio`. box: (height, width). enlarge: also scale a picture up; otherwise one that fits keeps its size. The
    picture's longer side is at most `ratio` times the shorter.
    """
    if height <= box[0] and width <= box[1] and not enlarge:
        return height, width
    if height * box[1] >= width * box[0]:
        return box[0], max(1, width * box[0] // height, -(-box[0] // ratio))
    return max(1, height * box[1] // width, -(-box[1] // ratio)), box[1]


def fitted(
    image: Image, box: tuple[int, int], *, enlarge: bool = False, limits: PictureLimits = LIMITS, number: int = 1
) -> Image:
    """Return a picture scaled to `fitted_size`, with bicubic interpolation; itself if that is its size.

    number: of the picture, from 1, for messages. ValueError, before the picture is scaled, if the new size is beyond
    the limits.
    """
    height, width = fitted_size(*image.size, box, enlarge=enlarge, ratio=limits.ratio)
    if (height, width) == image.size:
        return image
    with numbered(number):
        limits.check(height, width)
    library = pillow()
    scaled = library.fromarray(image.pixels).resize((width, height), library.Resampling.BICUBIC)
    return open_image(scaled, limits, number)
