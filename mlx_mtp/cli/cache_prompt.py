"""Define `mlx-mtp cache-prompt`: prefill the start of a prompt once, for any number of continuations."""

from typing import Any

import click

from ..machine.paths import expanded
from . import options
from .advice import warn_of_length
from .image_options import WithImages, image_options
from .together import own_file


@click.command("cache-prompt", cls=WithImages)
@options.model_options
@click.option("--eos-token", help="The tokenizer's end-of-text token.")
@options.system_prompt_option
@click.option("--prompt", "-p", required=True, help="Start of the message; '-' reads standard input.")
@image_options
@click.option("--prompt-cache-file", required=True, callback=options.check_place, help="File to write.")
@options.no_template_option
@options.template_config_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@options.cache_options
def cache_prompt(**flags: Any) -> None:
    """Prefill a prompt and save its caches in a file.

    With --prompt-cache-file, generate and chat continue that prompt as if their text followed it, and use its model
    if --model is not given. They prefill it again, with a notice, if their model has another lane (--kernels).
    """
    text = options.read_prompt(flags["prompt"])
    model, tokenizer = options.load_model(flags)
    from ..cache.prompt_prefix import PromptPrefix
    from ..checkpoint.chat_template import stable_tokens
    from ..pictures.prompt import opened
    from ..pictures.rows import pictures_as_json

    pictures = opened(model, flags["images"], flags["resize_shape"])
    template, name = tokenizer.has_chat_template and not flags["ignore_chat_template"], flags["model"]
    if name and expanded(name).is_dir():  # valid in any working directory
        name = str(expanded(name).absolute())
    own: Any = {"model": name, "eos_token": flags["eos_token"], "images": pictures_as_json(pictures)}
    prefix = PromptPrefix(text, flags["system_prompt"], template, flags["chat_template_config"], **own)
    tokens = stable_tokens(prefix, tokenizer, model.vision)
    if not tokens:
        raise click.UsageError("the prompt is too short: text that follows may change all its tokens; lengthen it")
    warn_of_length(model, len(tokens))
    stats, file = _save(model, tokens, pictures, prefix, flags), own_file(flags["prompt_cache_file"])
    if not flags["quiet"]:
        click.echo(f"Prompt: {len(tokens)} tokens, {file.stat().st_size / 1e6:.1f} MB in {file}")
        click.echo(f"Peak memory: {stats.peak_memory / 1e9:.3f} GB")


def _save(model: Any, tokens: list[int], pictures: list[Any], prefix: Any, flags: dict[str, Any]) -> Any:
    """Prefill the tokens and write the file of --prompt-cache-file; return the statistics."""
    from ..cache.file import save_prompt_cache
    from ..cache.make_cache import make_prompt_cache
    from ..decoding.options import default_chunk
    from ..decoding.stats import Stats
    from ..generate import generate_step
    from .progress import PromptProgress, shows_progress

    drafts, step, stats = flags["num_draft_tokens"], flags["prefill_step_size"] or default_chunk(model), Stats()
    cache = make_prompt_cache(model, num_draft_tokens=drafts, **options.cache_layout(flags))
    kept = {"max_context": flags["max_context"], "check_memory": not flags["ignore_memory"], "prompt_cache": cache}
    kept |= {"prefill_step_size": step, "num_draft_tokens": drafts, "stats": stats}
    kept["pictures"] = pictures
    with PromptProgress(shown=shows_progress(quiet=flags["quiet"]), chunk=step) as progress:
        next(generate_step(tokens, model, max_tokens=0, prompt_progress_callback=progress, **kept), None)
    stats.note_peak_memory()
    cache.prefix = prefix
    save_prompt_cache(flags["prompt_cache_file"], cache)
    return stats
