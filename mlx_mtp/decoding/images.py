"""Turn the images that are given with a prompt into pictures, and their tokens into a part of the prompt."""

from collections.abc import Sequence
from typing import Any

from ..layers.target import Target
from ..pictures.prompt import opened, with_pictures
from ..pictures.rows import Picture
from .options import token_ids


def images_of(options: dict[str, Any]) -> Any:
    """Remove `images` and `image` from options, and return the one that is given; ValueError for both."""
    images, image = options.pop("images", None), options.pop("image", None)
    if images is not None and image is not None:
        raise ValueError("image: give either images or image, not both")
    return image if images is None else images


def with_images(
    model: Target, tokenizer: Any, ids: Any, images: Any, options: dict[str, Any], shape: Any
) -> tuple[Any, Sequence[Picture]]:
    """Return a prompt's token ids with those of its images, and its pictures; without images both as they are."""
    if not (pictures := opened(model, images, shape)):
        return ids, options.get("pictures", ())
    if options.get("pictures"):
        raise ValueError("pictures: give either images or pictures, not both")
    ids = token_ids(ids, model.vocab_size) if len(ids) else []  # pictures alone are a prompt, too
    return with_pictures(model.vision, ids, pictures, start=ids[:1] == [tokenizer.bos_token_id]), pictures
