"""Cut pictures for Step-3.7-Flash into an overview and tiles, and list the tokens that stand for them.

The plan of tiles depends on the picture's size and on the maximum of pixels alone. Source: transformers
`image_processing_step3p7.py`, which needs PyTorch.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...pictures.library import pillow

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MARKS = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
STRIDE = 4  # two convolutions of stride 2
LARGEST = 3024  # pixels of the longer side; a larger picture is scaled down before it is cut
FEATURE = -1  # in `Views.tokens`: a row of features


class Tiling(NamedTuple):
    """Sizes (width, height) of the overview, before it becomes a square, and of the picture that is cut into tiles.

    side: of a tile in pixels of that picture. across, down: numbers of tiles in a line and of lines, 0 without tiles.
    square: whether the picture is first filled up to a square with black.
    """

    overview: tuple[int, int]
    cut: tuple[int, int]
    side: int
    across: int
    down: int
    square: bool


class Views(NamedTuple):
    """The tower's input. pixels: of each tile, then of the overview, float32 [side, side, 3].

    tokens: for each row of the picture in the prompt a mark's token id, or FEATURE for a row of a view's features.
    """

    pixels: list[np.ndarray]
    tokens: list[int]


class Pixels:
    """Cuts, resizes and normalizes pictures.

    settings: preprocessor_config.json, None for the released values. config: config.json, whose vision_config has the
    tower's sizes. path: directory of the tokenizer. ValueError without Pillow, for sizes of views that do not fit the
    tower, or if the tokenizer lacks one of MARKS.
    """

    def __init__(self, settings: dict[str, Any] | None, config: dict, path: Path):
        pillow()
        settings, vision = settings or {}, config["vision_config"]
        size = settings.get("size") or {}
        self._size = int(size.get("height", vision.get("image_size", 728)))
        self._tile, self._largest = int(settings.get("patch_size", 504)), int(settings.get("max_image_size", LARGEST))
        self._mean, self._std = settings.get("image_mean", MEAN), settings.get("image_std", STD)
        stride = STRIDE * int(vision.get("patch_size", 14))
        if self._size % stride or self._tile % stride:
            raise ValueError(f"preprocessor_config.json: views of {self._size} and {self._tile} pixels; the tower "
                             f"needs multiples of {stride}")  # fmt: skip
        self._rows = {side: (side // stride) ** 2 for side in (self._size, self._tile)}
        self._marks = find_marks(path)

    def grid(self, height: int, width: int, most: int | None = None) -> tuple[int, int, int]:
        """Return (1, 1, rows): the number of rows in a prompt, with marks, for a picture of this size in pixels.

        most: maximum pixels of tiles and overview together; a picture that needs more has no tiles. The overview
        keeps its size, which may exceed `most`: the model was trained on no other.
        """
        plan = self._plan(width, height)
        if most is not None and plan.across * plan.down * self._tile**2 + self._size**2 > most:
            plan = plan._replace(across=0, down=0)
        return 1, 1, len(self._tokens(plan))

    def patches(self, pixels: np.ndarray, grid: tuple[int, int, int]) -> Views:
        """Return the views of RGB pixels [height, width, 3], with or without tiles as `self.grid` counted `grid`."""
        plan, image, library = self._plan(pixels.shape[1], pixels.shape[0]), pillow().fromarray(pixels), pillow()
        if len(self._tokens(plan)) != grid[2]:
            plan = plan._replace(across=0, down=0)
        if plan.square:
            whole = library.new("RGB", (max(image.size),) * 2)
            whole.paste(image)
            image = whole
        cut = image.resize(plan.cut, library.Resampling.BILINEAR)
        corners = [(x * plan.side, y * plan.side) for y in range(plan.down) for x in range(plan.across)]
        tiles = [cut.crop((x, y, min(x + plan.side, cut.width), min(y + plan.side, cut.height))) for x, y in corners]
        overview = image.resize(plan.overview, library.Resampling.BILINEAR)
        views = [*(self._values(tile, self._tile) for tile in tiles), self._values(overview, self._size)]
        return Views(views, self._tokens(plan))

    def _values(self, image: Any, side: int) -> np.ndarray:
        """Return an image, resized to side x side pixels and normalized, as float32 [side, side, 3]."""
        resized = np.asarray(image.resize((side, side), pillow().Resampling.BILINEAR), np.float32)
        return (resized / 255 - np.array(self._mean, np.float32)) / np.array(self._std, np.float32)

    def _plan(self, width: int, height: int) -> Tiling:
        """Return transformers' plan for a picture of this size in pixels."""
        square = min(width, height) < 32 and max(width, height) > 4 * min(width, height)
        if square:
            width = height = max(width, height)
        if max(width, height) > self._largest:
            scale = self._largest / max(width, height)
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        short, long = sorted((width, height))
        side = self._tile
        if long <= self._size:
            side = short if long / short > 1.5 else 0
        elif long / short > 4:
            side = min(short, self._tile)
        if not side:
            return Tiling((width, height), (width, height), 0, 0, 0, square)
        cut = [side * (n // side + (n % side > 0.2 * side)) if n >= side else n for n in (width, height)]
        across, down = (max(1, n // side) for n in cut)
        return Tiling((width, height), (cut[0], cut[1]), side, across, down, square)

    def _tokens(self, plan: Tiling) -> list[int]:
        """Return `Views.tokens` of a picture: tiles between marks, line by line, with a mark between two lines.

        The overview between its marks is last.
        """
        begin, end, newline, overview, overview_end = self._marks
        tile = [begin, *[FEATURE] * self._rows[self._tile], end]
        line = tile * plan.across
        found = [*([*line, newline] * (plan.down - 1)), *line] if plan.across else []
        return [*found, overview, *[FEATURE] * self._rows[self._size], overview_end]


def find_marks(path: Path) -> tuple[int, ...]:
    """Return the token ids of MARKS, in the order of MARKS, from the tokenizer.json in a directory.

    ValueError if the file is missing or invalid, or lacks one of MARKS.
    """
    try:
        added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: int(token["id"]) for token in added}
    except (OSError, ValueError, KeyError, TypeError) as e:
        state = f"missing or invalid ({type(e).__name__})"
        raise ValueError(f"{path}/tokenizer.json: {state}; pictures need the tokens in it") from None
    if missing := [mark for mark in MARKS if mark not in ids]:
        raise ValueError(f"{path}/tokenizer.json: no token {missing[0]}, which pictures need")
    return tuple(ids[mark] for mark in MARKS)
