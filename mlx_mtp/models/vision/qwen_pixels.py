"""Prepare pictures for Qwen's vision towers with transformers' processor, which needs Pillow but not PyTorch."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...pictures.library import pillow

BAND = 1 << 20  # pixels that are normalized at once: of 16 million, the processor's float64 values need 0.4 GB
RELEASED = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


class Pixels:
    """The image processor of a checkpoint.

    settings: its preprocessor_config.json; None for the values of released checkpoints. config: its config.json.
    path: unused. ValueError without Pillow, and for settings that do not fit the tower in config.json.
    """

    def __init__(self, settings: dict[str, Any] | None, config: dict, path: Path | None = None):
        pillow()
        module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")  # takes a second

        vision, kind = config["vision_config"], module.Qwen2VLImageProcessorPil
        sizes = {
            "patch_size": vision.get("patch_size", 16),
            "temporal_patch_size": vision.get("temporal_patch_size", 2),
            "merge_size": vision.get("spatial_merge_size", 2),
        }
        self._processor: Any = kind.from_dict({**RELEASED, **sizes} if settings is None else dict(settings))
        self._resize, self._factor = module.smart_resize, sizes["patch_size"] * sizes["merge_size"]
        for name, value in sizes.items():
            if (found := getattr(self._processor, name)) != value:
                raise ValueError(f"preprocessor_config.json: {name} is {found}; the tower in config.json has {value}")

    def grid(self, height: int, width: int, most: int | None = None) -> tuple[int, int, int]:
        """Return (1, h, w): the height and width, in rows of the prompt, of a picture of this size in pixels.

        most: maximum number of pixels after resizing, if that is less than the processor's own.
        """
        low, high = (int(self._processor.size[edge]) for edge in ("shortest_edge", "longest_edge"))
        high = high if most is None else min(most, high)
        resized = self._resize(height, width, self._factor, min(low, high), high)
        return 1, resized[0] // self._factor, resized[1] // self._factor

    def patches(self, pixels: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        """Return the tower's input, float32 [patches, values of a patch], from RGB pixels [height, width, 3].

        They are resized to fill `grid`, which is as `grid` returns it: (1, height, width) in rows of the prompt.
        """
        height, width = (side * self._factor for side in grid[1:])
        image = pillow().fromarray(pixels).resize((width, height), self._processor.resample)
        lines = max(1, BAND // (width * self._factor)) * self._factor
        bands = [image.crop((0, top, width, min(top + lines, height))) for top in range(0, height, lines)]
        return np.concatenate([self._values(band) for band in bands])

    def _values(self, image: Any) -> np.ndarray:
        """Return the patches of an image whose sides are multiples of a row's side in pixels, without resizing it."""
        return self._processor(images=image, do_resize=False, return_tensors="np")["pixel_values"]
