"""Turn the images that are given with a prompt into pictures, and their tokens into a part of the prompt."""

from collections.abc import Sequence
from typing import Any

from ..layers.target import Target
from ..pictures.prompt import as_list, opened, with_pictures
from ..pictures.rows import Picture
from .options import token_ids


def images_of(options: dict[str, Any]) -> Any:
    """Remove `images` and `image` from options, a dict, and return the value of the one that is given, else None.

    Raises ValueError if both are given, or any image together with `pictures`.
    """
    images, image = options.pop("images", None), options.pop("image", None)
    if images is not None and image is not None:
        raise ValueError("image: give either images or image, not both")
    found = image if images is None else images
    if options.get("pictures") and as_list(found):
        raise ValueError("pictures: give either images or pictures, not both")
    return found


def with_images(model: Target, tokenizer: Any, ids: Any, images: Any, shape: Any) -> tuple[Any, Sequence[Picture]]:
    """Return a prompt's tokens, with those of its images in the places of their marks, and the images' pictures.

    ids: token ids. images: None, one, or several, as in `opened`; without any the result is ids and (). shape:
    `resize_shape`. Raises ValueError as `token_ids`, `opened` and `with_pictures`.
    """
    if not (pictures := opened(model, images, shape)):
        return ids, ()
    ids = token_ids(ids, model.vocab_size) if len(ids) else []  # pictures alone are a prompt, too
    return with_pictures(model.vision, ids, pictures, start=ids[:1] == [tokenizer.bos_token_id]), pictures
