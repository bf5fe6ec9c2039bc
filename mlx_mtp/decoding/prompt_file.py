"""Load a prompt cache from a file; rows of another lane are computed again from the tokens."""

from collections.abc import Callable
from pathlib import Path

from ..cache.file import read_prompt_cache
from ..cache.prompt_cache import PromptCache
from ..cache.reread import adopt, empty_like
from ..layers.target import Target
from ..machine.errors import one_line
from ..machine.stream import in_turn
from .memory_needs import check_prompt
from .options import check_values, default_chunk
from .prefill import prefill, test_heads


@in_turn()
def load_prompt_cache(
    file: str | Path, model: Target, *, check_memory: bool = True, prefill_step_size: int | None = None
) -> PromptCache:
    """Return the cache that `save_prompt_cache` wrote to a file, without its heads' part if `model` has no heads.

    A file of the model that was made in another lane (another `kernels` of `load`) is prefilled again, which takes
    as long as its prompt, in chunks of `prefill_step_size` tokens (None: the model's default). Of a split model each
    rank reads its own file. Raises ValueError with the reason if the file is not a prompt cache, is damaged, has
    another format version, belongs to another model, vision tower, rank or other heads, has pictures and was made in
    another lane, or (unless check_memory is False) if memory is too small; OSError if it cannot be read.
    """
    check_values({"prefill_step_size": prefill_step_size})
    cache, fits = read_prompt_cache(file, model, check_memory=check_memory)
    if not fits:
        read_in_lane(model, cache, prefill_step_size or default_chunk(model), check_memory=check_memory)
    return cache


@in_turn()
def read_in_lane(
    model: Target,
    cache: PromptCache,
    chunk: int,
    *,
    check_memory: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Replace the arrays of a cache of `read_prompt_cache` by those that the model computes from its tokens.

    chunk, progress: as in `prefill`. Raises ValueError if memory is too small, unless check_memory is False.
    """
    fresh, n = empty_like(cache), len(cache.tokens)
    with one_line("the prompt cache is of another lane, and its prompt cannot be read again", (ValueError,)):
        if cache.heads:
            test_heads(model)
        check_prompt(model, fresh, n, 0, chunk, ignore=not check_memory)
        fresh.begin(n)
        prefill(model, fresh, cache.tokens, heads=bool(cache.heads), chunk=chunk, progress=progress)
    adopt(cache, fresh)
