"""The kernels that a loaded model runs with."""

from typing import Any

from .kernels import _source


def switch_on(model: Any, lane: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Switch on the model's kernels; the report's lines, and the ops whose bits may depend on the number of rows.

    lane: None decides by trial, "exact" and "fast" take what is right, "off" takes none.
    """
    if not _source.on_metal():
        return ("none: no Metal GPU",), ()
    return ("none: no kernel takes the place of a layer yet",), ()
