"""`mlx-mtp generate`: one answer, with mlx_lm's output layout."""

import sys
from typing import TYPE_CHECKING, Any

import click

from .options import (
    cache_options,
    check_max_tokens,
    check_text,
    generation_options,
    load_model,
    memory_options,
    model_options,
    parse_template_config,
    sampling_options,
)

if TYPE_CHECKING:
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
@click.option("--prompt-cache-file", type=click.Path(exists=True, dir_okay=False), help="Continue a saved cache.")
@click.option("--report", is_flag=True, help="Say what was loaded.")
def generate(**flags: Any) -> None:
    """Print the model's continuation of, or answer to, a prompt."""
    text = sys.stdin.read() if flags["prompt"] == "-" else flags["prompt"].replace("\\n", "\n").replace("\\t", "\t")
    model, tokenizer = load_model(flags)
    if flags["report"]:
        click.echo(str(model.report()))
    prompt = _tokens(tokenizer, text, flags)
    last = _print_text(model, tokenizer, prompt, flags)
    if last and flags["verbose"] and not flags["quiet"]:
        _summary(last)


def _print_text(model: Any, tokenizer: Any, prompt: list[int], flags: dict[str, Any]) -> "GenerationResponse | None":
    """Print the text as it comes; its last response."""
    from ..generate import stream_generate
    from .progress import PromptProgress, shows_progress

    options = generation_options(model, tokenizer, flags)
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
    if any("\ud800" <= c <= "\udfff" for c in text):  # what Python makes of bytes that are no text
        raise click.UsageError("the prompt is not valid UTF-8 text")
    template = tokenizer.has_chat_template and not flags["ignore_chat_template"]
    if template:
        text = _conversation(tokenizer, text, flags)
    tokens = tokenizer.encode(text, add_special_tokens=not template)
    if not tokens and template:
        raise ValueError("the prompt is empty: the chat template makes nothing of it")
    if not tokens:
        raise click.UsageError("the prompt is empty")
    return tokens


def _conversation(tokenizer: Any, text: str, flags: dict[str, Any]) -> str:
    """The messages of the flags as the chat template writes them."""
    from ..session import render

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
