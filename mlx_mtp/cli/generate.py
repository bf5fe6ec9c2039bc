"""Define `mlx-mtp generate`: generate one answer, with mlx_lm's output layout."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from . import options
from .advice import advised_and_not_given, warn_of_length
from .image_options import WithImages, image_options
from .saved_cache import continues_cache, saved_cache, saved_cache_option


@click.command(cls=WithImages)
@options.model_options
@click.option("--extra-eos-token", multiple=True, help="Another token that ends the text; repeatable.")
@options.system_prompt_option
@click.option("--prompt", "-p", default="hello", help="The message; '-' reads standard input.")
@image_options
@click.option("--prefill-response", callback=options.check_text, help="Start of the answer.")
@options.text_options(max_tokens=100)
@options.no_template_option
@click.option("--use-default-chat-template", is_flag=True, help="Use the default template of the tokenizer's class.")
@options.template_config_option
@click.option("--verbose", type=bool, default=True, help="false prints the text without figures.")
@click.option("--quiet", is_flag=True, help="Print the text only: no notices, figures or progress.")
@options.cache_options
@saved_cache_option
@click.option("--report", is_flag=True, help="Print what was loaded.")
def generate(**flags: Any) -> None:
    """Generate an answer to a prompt, or its continuation."""
    text = options.read_prompt(flags["prompt"])
    continues_cache(flags)
    model, tokenizer = options.load_model(flags)
    from ..decoding.options import default_chunk
    from ..generate import stream_generate
    from ..pictures.prompt import opened
    from .progress import PromptProgress, shows_progress

    if flags["report"]:
        click.echo(str(model.report))
    if not flags["quiet"]:
        _note_advice(flags)
    cache, pictures = saved_cache(model, flags), opened(model, flags["images"], flags["resize_shape"])
    follow = _tokens if cache is None else partial(_following, cache)
    prompt = follow(tokenizer, text, flags, model.vision, pictures)
    warn_of_length(model, len(prompt) + (cache.offset if cache else 0))
    kept = {**options.generation_options(tokenizer, flags, cache), "pictures": pictures}
    chunk = kept["prefill_step_size"] or default_chunk(model)
    progress = PromptProgress(shown=shows_progress(quiet=flags["quiet"]), chunk=chunk)
    responses = stream_generate(model, tokenizer, prompt, **kept, prompt_progress_callback=progress)
    figures = flags["verbose"] and not flags["quiet"]
    if figures:
        click.echo("=" * 10)
    last = None
    with progress:
        for last in responses:
            click.echo(last.text, nl=False)
    click.echo()
    if last is None or not figures:
        return
    click.echo("=" * 10)
    click.echo(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
    click.echo(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
    click.echo(f"Peak memory: {last.peak_memory:.3f} GB")
    stats = last.stats
    if stats and (stats.num_draft_tokens or stats.every_draft[0]):
        click.echo(f"MTP: {stats.summary}")


def _note_advice(flags: dict[str, Any]) -> None:
    """Print a note on stderr if the checkpoint advises a temperature above 0 and --temp is not given."""
    found = advised_and_not_given(flags)
    if found.get("temp") and not flags["temp"]:
        values = ", ".join(f"{name} {value}" for name, value in found.items())
        click.echo(f"Greedy, as mlx_lm.generate; generation_config.json advises {values}.", err=True)


def _tokens(tokenizer: Any, text: str, flags: dict[str, Any], vision: Any, pictures: Sequence[Any]) -> list[int]:
    """Encode the prompt, with the chat template unless it is missing or ignored; pictures precede its text.

    vision: `Target.vision`. A prompt without a token raises ValueError with the template and UsageError without it.
    """
    from ..checkpoint.chat_template import encode_messages
    from ..pictures.prompt import with_pictures

    template = tokenizer.has_chat_template and not flags["ignore_chat_template"]
    if template:
        contents = {"system": flags["system_prompt"], "user": text, "assistant": flags["prefill_response"]}
        messages = [{"role": role, "content": content} for role, content in contents.items() if content is not None]
        prefilled = flags["prefill_response"] is not None
        ending = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled}
        messages = [{**each, "pictures": pictures} if each["role"] == "user" else each for each in messages]
        tokens = encode_messages(tokenizer, messages, {**flags["chat_template_config"], **ending}, vision)
    else:
        tokens = tokenizer.encode(text)
        if pictures:
            tokens = with_pictures(vision, tokens, pictures, start=tokens[:1] == [tokenizer.bos_token_id])
    if not tokens and template:
        raise ValueError("the prompt is empty: the chat template renders nothing; use --ignore-chat-template")
    if not tokens:
        raise click.UsageError("the prompt is empty; give a text with --prompt")
    return tokens


def _following(
    cache: Any, tokenizer: Any, text: str, flags: dict[str, Any], vision: Any, pictures: Sequence[Any]
) -> list[int]:
    """Return the tokens that follow those of a saved cache, when `text` is appended to the cache's own prompt.

    vision: `Target.vision`. For a cache without `prefix`, they are the text's tokens. UsageError for any pictures,
    which would precede the cache's prompt, and if the prompt with the text does not begin with the cache's tokens;
    ValueError as `PromptPrefix.check` for other flags than the cache's.
    """
    prefix = cache.prefix
    if pictures:
        raise click.UsageError("--image: pictures precede the cache's prompt; give them to `mlx-mtp cache-prompt`")
    if prefix is None:
        return tokenizer.encode(text, add_special_tokens=False)
    own = {"system_prompt": prefix.system_prompt, "chat_template_config": prefix.template_config}
    prefix.check(system_prompt=flags["system_prompt"], template_config=flags["chat_template_config"])
    own["ignore_chat_template"] = not prefix.template
    tokens = _tokens(tokenizer, prefix.prompt + text, {**flags, **own}, vision, prefix.pictures)
    if tokens[: cache.offset] != cache.tokens:
        raise click.UsageError(
            f"{flags['prompt_cache_file']}: its prompt, followed by this text, does not begin with its tokens "
            "(another chat template or tokenizer, or one with a date); write it again with `mlx-mtp cache-prompt`"
        )
    return tokens[cache.offset :]
