"""Continue the prompt of a file of `mlx-mtp cache-prompt`: the option, and the cache that is loaded for it."""

from pathlib import Path
from typing import Any

import click

from .given_file import GivenFile
from .options import cache_layout
from .together import own_file


class SavedCache(GivenFile):
    """Type of an option's value: an existing file of a saved prompt cache; returns the named path.

    Of several ranks, rank 0 reads the named file and rank n "<file>.rank<n>" next to it; each checks its own.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(own_file(Path(value)), param, ctx)
        return Path(value)


saved_cache_option = click.option(
    "--prompt-cache-file",
    type=SavedCache(),
    help="File of `mlx-mtp cache-prompt` whose prompt the message continues.",
)


def continues_cache(flags: dict[str, Any]) -> None:
    """Set in `flags` the end-of-text token and, unless --model is given, the model of a --prompt-cache-file.

    Without such a file, or if it states no prompt, nothing changes.
    """
    if flags["prompt_cache_file"] is not None:
        from ..cache.file import saved_prefix

        if prefix := saved_prefix(own_file(flags["prompt_cache_file"])):
            flags["model"], flags["eos_token"] = flags["model"] or prefix.model, prefix.eos_token


def saved_cache(model: Any, flags: dict[str, Any]) -> Any:
    """Load the cache of --prompt-cache-file, None without one; UsageError if flags request another layout.

    If it was made in another lane, its prompt is read again, with a notice. Other errors are those of
    `load_prompt_cache`.
    """
    file = flags["prompt_cache_file"]
    if file is None:
        return None
    from ..cache.file import read_prompt_cache

    cache, fits = read_prompt_cache(file, model, check_memory=not flags["ignore_memory"])
    requested = {name: value for name, value in cache_layout(flags).items() if value is not None}
    for name, found in cache.layout.items():
        if requested.get(name, found) != found:
            flag = f"--{name.replace('_', '-')} {requested[name]}"
            made = "without it" if found is None else f"with {found}"
            raise click.UsageError(f"{flag}: the prompt cache in {file} was made {made}; leave {flag} out")
    if model.mtp and not cache.heads and not flags["quiet"]:
        click.echo(f"{file} holds no state of the heads: decoding plainly.", err=True)
    if not fits:
        _read_again(model, cache, flags)
    return cache


def _read_again(model: Any, cache: Any, flags: dict[str, Any]) -> None:
    """Prefill the tokens of a cache whose file is of another lane, with a notice and progress."""
    from ..decoding.options import default_chunk
    from ..decoding.prompt_file import read_in_lane
    from .progress import PromptProgress, shows_progress

    file, lane, n = flags["prompt_cache_file"], model.runtime.lane, len(cache.tokens)
    if not flags["quiet"]:
        click.echo(f"{file} was made in another lane than {lane}: its {n} tokens are read again.", err=True)
    chunk = flags["prefill_step_size"] or default_chunk(model)
    with PromptProgress(shown=shows_progress(quiet=flags["quiet"]), chunk=chunk) as progress:
        read_in_lane(model, cache, chunk, check_memory=not flags["ignore_memory"], progress=progress)
