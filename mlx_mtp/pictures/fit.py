"""Scale a picture to fit a box, with its ratio kept."""

from .image import LIMITS, Image, Limits, numbered, open_image
from .library import pillow


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
    image: Image, box: tuple[int, int], *, enlarge: bool = False, limits: Limits = LIMITS, number: int = 1
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
