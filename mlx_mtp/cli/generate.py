"""`mlx-mtp generate`: one answer, with mlx_lm's output layout."""

from typing import TYPE_CHECKING, Any

import click

from .options import (
    cache_file_option,
    cache_options,
    check_max_tokens,
    check_text,
    continues_cache,
    generation_options,
    load_model,
    memory_options,
    model_options,
    parse_template_config,
    read_prompt,
    sampling_options,
    saved_cache,
)

if TYPE_CHECKING:
    from ..cache.prompt_cache import PromptCache
    from ..generate import GenerationResponse


@click.command()
@model_options
@click.option("--extra-eos-token", multiple=True, help="One more token that ends the text; repeatable.")
@click.option("--system-prompt", callback=check_text, help="System message of the chat template.")
@click.option("--prompt", "-p", default="hello", help="The message; '-' reads standard input.")
@click.option("--prefill-response", callback=check_text, help="Beginning of the answer.")
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(-1),
    callback=check_max_tokens,
    default=100,
    help="Most tokens; -1 is no limit.",
)
@sampling_options
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--use-default-chat-template", is_flag=True, help="Use the tokenizer class's own template.")
@click.option("--chat-template-config", callback=parse_template_config, help="JSON object of template variables.")
@click.option("--verbose", type=bool, default=True, help="False prints the text without figures.")
@click.option("--quiet", is_flag=True, help="Print the text only: no notices, figures or progress.")
@cache_options
@memory_options
@cache_file_option
@click.option("--report", is_flag=True, help="Say what was loaded.")
def generate(**flags: Any) -> None:
    """Print the model's continuation of, or answer to, a prompt."""
    text = read_prompt(flags["prompt"])
    continues_cache(flags)
    model, tokenizer = load_model(flags)
    if flags["report"]:
        click.echo(str(model.report))
    cache = saved_cache(model, flags)
    prompt = _tokens(tokenizer, text, flags) if cache is None else _following(tokenizer, text, flags, cache)
    options = generation_options(model, tokenizer, flags, cache)
    last = _print_text(model, tokenizer, prompt, options, flags)
    if last and flags["verbose"] and not flags["quiet"]:
        _summary(last)


def _print_text(
    model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any], flags: dict[str, Any]
) -> "GenerationResponse | None":
    """Print the text as it comes; its last response."""
    from ..generate import stream_generate
    from .progress import PromptProgress, shows_progress

    shown = shows_progress(quiet=flags["quiet"])
    progress = PromptProgress(shown=shown, chunk=options["prefill_step_size"])
    responses = stream_generate(model, tokenizer, prompt, **options, prompt_progress_callback=progress)
    if flags["verbose"] and not flags["quiet"]:
        click.echo("=" * 10)
    last = None
    with progress:
        for last in responses:
            click.echo(last.text, nl=False)
    click.echo()
    return last


def _tokens(tokenizer: Any, text: str, flags: dict[str, Any]) -> list[int]:
    """The prompt's token ids, through the chat template where there is one."""
    template = tokenizer.has_chat_template and not flags["ignore_chat_template"]
    if template:
        text = _conversation(tokenizer, text, flags)
    tokens = tokenizer.encode(text, add_special_tokens=not template)
    if not tokens and template:
        raise ValueError("the prompt is empty: the chat template makes nothing of it")
    if not tokens:
        raise click.UsageError("the prompt is empty")
    return tokens


def _following(tokenizer: Any, text: str, flags: dict[str, Any], cache: "PromptCache") -> list[int]:
    """The token ids behind those of a saved cache, whose message goes on with the text, or which it follows."""
    opening = cache.opening
    if opening is None:
        return tokenizer.encode(text, add_special_tokens=False)
    own = {"system_prompt": opening.system_prompt, "chat_template_config": opening.template_config}
    opening.check(system_prompt=flags["system_prompt"], template_config=flags["chat_template_config"])
    tokens = _tokens(tokenizer, opening.prompt + text, {**flags, **own, "ignore_chat_template": not opening.template})
    if tokens[: cache.offset] != cache.tokens:
        raise click.UsageError(f"the prompt's tokens do not begin with those in {flags['prompt_cache_file']}")
    return tokens[cache.offset :]


def _conversation(tokenizer: Any, text: str, flags: dict[str, Any]) -> str:
    """The messages of the flags as the chat template writes them."""
    from ..cache.prompt_prefix import render

    messages = [{"role": "user", "content": text}]
    if flags["system_prompt"] is not None:
        messages.insert(0, {"role": "system", "content": flags["system_prompt"]})
    prefilled = flags["prefill_response"] is not None
    if prefilled:
        messages.append({"role": "assistant", "content": flags["prefill_response"]})
    ending = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled}
    return render(tokenizer, messages, {**flags["chat_template_config"], **ending})


def _summary(last: "GenerationResponse") -> None:
    click.echo("=" * 10)
    click.echo(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
    click.echo(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
    click.echo(f"Peak memory: {last.peak_memory:.3f} GB")
    stats = last.stats
    if stats and stats.num_draft_tokens:
        rates = " / ".join(f"{rate:.0%}" for rate in stats.acceptance)
        found = f", {stats.lookup_accepted} of {stats.lookup_drafted} looked up" if stats.lookups else ""
        click.echo(
            f"MTP: {stats.drafts_per_cycle:.1f} drafts per cycle (at most {stats.num_draft_tokens}), "
            f"{stats.tokens_per_cycle:.2f} tokens per cycle, accepted {rates}{found}"
        )
