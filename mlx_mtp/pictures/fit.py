"""Scale a picture to fit a box, with its ratio kept."""

from .image import Image, open_image
from .library import pillow


def fitted_size(height: int, width: int, box: tuple[int, int], *, enlarge: bool = False) -> tuple[int, int]:
    """Return the (height, width) in pixels of the largest picture of the same ratio that fits into a box.

    Sides are rounded down, to at least 1. box: (height, width). enlarge: also scale a picture up; otherwise one that
    fits keeps its size.
    """
    scale = min(box[0] / height, box[1] / width)
    if scale >= 1 and not enlarge:
        return height, width
    return max(1, int(height * scale)), max(1, int(width * scale))


def fitted(image: Image, box: tuple[int, int], *, enlarge: bool = False) -> Image:
    """Return a picture scaled to `fitted_size`, with bicubic interpolation; itself if that is its size.

    ValueError if the new size is beyond LIMITS, as its ratio can be after rounding.
    """
    height, width = fitted_size(*image.size, box, enlarge=enlarge)
    if (height, width) == image.size:
        return image
    library = pillow()
    return open_image(library.fromarray(image.pixels).resize((width, height), library.Resampling.BICUBIC))
