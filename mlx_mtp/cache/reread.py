"""Rebuild a cache whose arrays are lost, by reading its tokens again."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..machine.errors import one_line
from .kinds import from_configs
from .prompt_cache import PromptCache


@contextmanager
def rebuilt(cache: PromptCache) -> Iterator[PromptCache]:
    """Context that yields an empty cache, into which the block reads the tokens of `cache` again.

    At the end `cache` gets its contents, with paused heads. A ValueError in the block is raised as one which states
    that the prompt cannot be read again. One cause: a picture's image is dropped once it is read, so a picture whose
    features are no longer stored cannot be encoded.
    """
    fresh = empty_like(cache)
    with one_line("a kernel failed, the caches are lost, and the prompt cannot be read again", (ValueError,)):
        yield fresh
    adopt(cache, fresh)


def empty_like(cache: PromptCache) -> PromptCache:
    """Return an empty cache that equals `cache` once it has read the same tokens; it has the same `pictures`.

    Layers that were quantized during the sequence start unquantized, and will be quantized at the same position.
    """
    new = cache.like_new()
    new.pictures = cache.pictures
    if cache.quantized:
        stored = "bits", "group_size"
        configs = [{name: v for name, v in c.empty_config.items() if name not in stored} for c in cache.layers]
        new.layers, new.quantizing = from_configs(configs), cache.quantized
    for c, own in zip(new.caches, cache.caches, strict=True):
        c.context = own.context
    new.reserve(cache._reserved)
    return new


def adopt(cache: PromptCache, read: PromptCache) -> None:
    """Replace the contents of a cache by those of `read`, made by `empty_like`, which has read the tokens again.

    The layer objects of `cache` stay, so that marks still refer to them. Its heads are paused.
    """
    if cache.quantizing is None:
        read.quantize_at(read.offset)
    for c, new in zip(cache.caches, read.caches, strict=True):
        assert type(c) is type(new), "caches of another kind"
        vars(c).update(vars(new))
    cache.tokens, cache.primed, cache.kept, cache.backlog = read.tokens, read.primed, read.kept, read.backlog
    cache.quantizing, cache.live = read.quantizing, False
