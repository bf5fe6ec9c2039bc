"""`mlx-mtp cache-prompt`: read the beginning of a prompt once, for many to go on from."""

import os
from pathlib import Path
from typing import Any

import click

from .options import (
    cache_layout,
    cache_options,
    check_text,
    default_step,
    load_model,
    memory_options,
    model_options,
    parse_template_config,
    read_prompt,
)


def check_place(_ctx: click.Context, _param: click.Parameter, value: str) -> Path:
    """Callback: a file can be there, which is asked before anything is read."""
    path = Path(value)
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent} is not a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path.parent} cannot be written to")
    if path.exists() and not path.is_file():
        raise click.BadParameter(f"{value} is not a file")
    return path


@click.command("cache-prompt")
@model_options
@click.option("--eos-token", help="The tokenizer's end-of-text token.")
@click.option("--system-prompt", callback=check_text, help="System message of the chat template.")
@click.option("--prompt", "-p", required=True, help="Beginning of the message; '-' reads standard input.")
@click.option("--prompt-cache-file", required=True, callback=check_place, help="File to write.")
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--chat-template-config", callback=parse_template_config, help="JSON object of template variables.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@cache_options
@memory_options
def cache_prompt(**flags: Any) -> None:
    """Read a prompt and keep what the model, and its heads, know after it.

    generate and chat then go on with --prompt-cache-file, as if their text stood behind that prompt, and with the
    same model where no other is named.
    """
    text = read_prompt(flags["prompt"])
    model, tokenizer = load_model(flags)
    from ..cache.prompt_prefix import Opening

    template = tokenizer.has_chat_template and not flags["ignore_chat_template"]
    own = {"model": _lasting(flags["model"]), "eos_token": flags["eos_token"]}
    opening = Opening(text, flags["system_prompt"], template, flags["chat_template_config"], **own)
    tokens = opening.settled(tokenizer)
    if not tokens:
        raise click.UsageError("the prompt is too short: none of its tokens is certain before what follows is known")
    stats = _read(model, tokens, opening, flags)
    if not flags["quiet"]:
        size = flags["prompt_cache_file"].stat().st_size
        click.echo(f"Prompt: {len(tokens)} tokens, {size / 1e6:.1f} MB in {flags['prompt_cache_file']}")
        click.echo(f"Peak memory: {stats.peak_memory / 1e9:.3f} GB")


def _lasting(model: str | None) -> str | None:
    """A model's name that means the same in another directory."""
    path = Path(model or "").expanduser()
    return str(path.absolute()) if model and path.is_dir() else model


def _read(model: Any, tokens: list[int], opening: Any, flags: dict[str, Any]) -> Any:
    """Read the tokens and write the file; how it went."""
    from ..cache.file import save_prompt_cache
    from ..cache.prompt_cache import make_prompt_cache
    from ..decoding.stats import Stats
    from ..generate import generate_step
    from ..machine.memory import wired
    from .progress import PromptProgress, shows_progress

    drafts, step = flags["num_draft_tokens"], flags["prefill_step_size"] or default_step()
    layout, stats = cache_layout(model, flags), Stats()
    cache = make_prompt_cache(model, num_draft_tokens=drafts, **layout)
    progress = PromptProgress(shown=shows_progress(quiet=flags["quiet"]), chunk=step)
    options = {"max_context": flags["max_context"], "check_memory": not flags["ignore_memory"], "prompt_cache": cache}
    options |= {"prefill_step_size": step, "num_draft_tokens": drafts, "stats": stats}
    with progress, wired():
        next(generate_step(tokens, model, max_tokens=0, prompt_progress_callback=progress, **options), None)
    stats.notes_memory()
    cache.opening = opening
    save_prompt_cache(flags["prompt_cache_file"], cache)
    return stats
