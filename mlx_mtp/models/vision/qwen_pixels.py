"""Prepare pictures for Qwen's vision towers with transformers' processor, which needs Pillow but not PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np

from ...machine.errors import one_line
from ...pictures.library import pillow

RELEASED = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FILES = ("preprocessor_config.json", "processor_config.json")


class Pixels:
    """The processor of a checkpoint: its preprocessor_config.json or, without the file, the released values."""

    def __init__(self, path: Path, config: dict):
        pillow()
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

        vision, kind = config["vision_config"], module.Qwen2VLImageProcessorPil
        sizes = {
            "patch_size": vision.get("patch_size", 16),
            "temporal_patch_size": vision.get("temporal_patch_size", 2),
            "merge_size": vision.get("spatial_merge_size", 2),
        }
        if any((path / file).is_file() for file in FILES):
            with one_line(f"{path}/{FILES[0]}: not usable"):
                self._processor: Any = kind.from_pretrained(path, local_files_only=True)
        else:
            self._processor = kind(**RELEASED, **sizes)
        self._resize = module.smart_resize
        for name, value in sizes.items():
            if (found := getattr(self._processor, name)) != value:
                raise ValueError(f"{path}/{FILES[0]}: {name} is {found}; the tower in config.json has {value}")

    def grid(self, height: int, width: int, most: int | None = None) -> tuple[int, int, int]:
        """Return (1, h, w): the rows of the prompt for a picture of this size in pixels."""
        factor, limits = self._processor.patch_size * self._processor.merge_size, self._limits(most)
        resized = self._resize(height, width, factor, limits["shortest_edge"], limits["longest_edge"])
        return 1, resized[0] // factor, resized[1] // factor

    def patches(self, pixels: np.ndarray, most: int | None = None) -> np.ndarray:
        """Return the values [patches, n], float32, of RGB pixels [height, width, 3]; the processor resizes them."""
        image = pillow().fromarray(pixels)
        return self._processor(images=image, size=self._limits(most), return_tensors="np")["pixel_values"]

    def _limits(self, most: int | None) -> dict[str, int]:
        """Return the minimum and the maximum number of pixels after resizing. most: a smaller maximum."""
        low, high = (int(self._processor.size[edge]) for edge in ("shortest_edge", "longest_edge"))
        high = high if most is None else min(most, high)
        return {"shortest_edge": min(low, high), "longest_edge": high}
