"""Turn the images that are given with a prompt into pictures, and their tokens into a part of the prompt."""

from collections.abc import Sequence
from typing import Any

from ..layers.target import Target
from ..pictures.prompt import as_list, opened, with_pictures
from ..pictures.rows import Picture
from .options import token_ids


def images_of(options: dict[str, Any]) -> Any:
    """Remove `images` and `image` from options, and return the one that is given.

    Raises ValueError if both are given, or images besides `pictures`.
    """
    images, image = options.pop("images", None), options.pop("image", None)
    if images is not None and image is not None:
        raise ValueError("image: give either images or image, not both")
    found = image if images is None else images
    if options.get("pictures") and as_list(found):
        raise ValueError("pictures: give either images or pictures, not both")
    return found


def with_images(model: Target, tokenizer: Any, ids: Any, images: Any, shape: Any) -> tuple[Any, Sequence[Picture]]:
    """Return a prompt's token ids with those of its images, and the images' pictures.

    Without images the ids are returned unchanged. shape: `resize_shape`. Raises ValueError as `opened`, and as
    `with_pictures`.
    """
    if not (pictures := opened(model, images, shape)):
        return ids, ()
    ids = token_ids(ids, model.vocab_size) if len(ids) else []  # pictures alone are a prompt, too
    return with_pictures(model.vision, ids, pictures, start=ids[:1] == [tokenizer.bos_token_id]), pictures
