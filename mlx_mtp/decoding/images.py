"""Put the images that a caller gives with a prompt into its tokens."""

from collections.abc import Sequence
from typing import Any

from ..layers.target import Target
from ..pictures.prompt import opened, with_pictures
from ..pictures.rows import Picture
from .options import token_ids


def with_images(model: Target, tokenizer: Any, ids: Any, options: dict[str, Any]) -> Any:
    """Remove `images`, `image` and `resize_shape` from options; return the prompt's token ids with the images' rows.

    images: paths, bytes of files, `data:` URLs or images of Pillow, one for each mark of a picture in the prompt; if
    that has no mark, the pictures come before the text. image: the same, or a single one. resize_shape: (width,
    height) to which each is scaled, with its ratio kept. The images become `pictures` of the options. Without images the ids are returned unchanged. Raises ValueError if
    two of the options contradict, and as `opened` and `with_pictures`.
    """
    images, image, shape = (options.pop(name, None) for name in ("images", "image", "resize_shape"))
    if images is not None and image is not None:
        raise ValueError("image: give either images or image, not both")
    if not (pictures := opened(model, image if images is None else images, shape)):
        return ids
    if options.get("pictures"):
        raise ValueError("pictures: give either images or pictures, not both")
    ids = token_ids(ids, model.vocab_size) if len(ids) else []  # pictures alone are a prompt, too
    options["pictures"] = pictures
    return with_pictures(model.vision, ids, pictures, start=ids[:1] == [tokenizer.bos_token_id])


def all_with_images(
    model: Target, tokenizer: Any, prompts: Sequence[Any], options: dict[str, Any]
) -> tuple[list[Any], list[Sequence[Picture]]]:
    """Return each prompt's token ids and pictures, of a batch; remove `images` and `resize_shape` from options.

    images: a list of images per prompt, None for none.
    """
    images, shape = options.pop("images", None) or [None] * len(prompts), options.pop("resize_shape", None)
    each: list[dict[str, Any]] = [{"images": given, "resize_shape": shape} for given in images]
    ids = [with_images(model, tokenizer, *pair) for pair in zip(prompts, each, strict=True)]
    return ids, [found.get("pictures", ()) for found in each]
