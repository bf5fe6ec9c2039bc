"""`mlx-mtp generate`: one answer, with mlx_lm's output layout."""

import sys
from typing import Any

import click
import mlx.core as mx

from ..generate import GenerationResponse, stream_generate
from .options import (
    cache_options,
    generation_options,
    load_model,
    model_options,
    parse_json,
    sampling_options,
)


@click.command()
@model_options
@click.option("--extra-eos-token", multiple=True, help="One more token that ends the text; repeatable.")
@click.option("--system-prompt", help="System message of the chat template.")
@click.option("--prompt", "-p", default="hello", help="The message; '-' reads standard input.")
@click.option("--prefill-response", help="Beginning of the answer.")
@click.option("--max-tokens", "-m", type=click.IntRange(-1), default=100, help="Most tokens; -1 is no limit.")
@sampling_options
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--use-default-chat-template", is_flag=True, help="Use the tokenizer class's own template.")
@click.option("--chat-template-config", callback=parse_json, help="JSON object of template variables.")
@click.option("--verbose", type=bool, default=True, help="False prints the text only.")
@cache_options
@click.option("--prompt-cache-file", type=click.Path(exists=True, dir_okay=False), help="Continue a saved cache.")
@click.option("--report", is_flag=True, help="Say what was loaded.")
def generate(**flags: Any) -> None:
    """Print the model's continuation of, or answer to, a prompt."""
    if flags["max_tokens"] == 0:
        raise click.BadParameter("0: allowed is 1 or more, or -1 for no limit", param_hint="--max-tokens")
    text = sys.stdin.read() if flags["prompt"] == "-" else flags["prompt"].replace("\\n", "\n").replace("\\t", "\t")
    model, tokenizer = load_model(flags)
    if flags["report"]:
        click.echo(str(model.report()))
    prompt = _tokens(tokenizer, text, flags)
    responses = stream_generate(model, tokenizer, prompt, **generation_options(model, tokenizer, flags))
    if flags["verbose"]:
        click.echo("=" * 10)
    last = None
    for last in responses:
        click.echo(last.text, nl=False)
    click.echo()
    if flags["verbose"] and last:
        _summary(last)


def _tokens(tokenizer: Any, text: str, flags: dict[str, Any]) -> list[int]:
    """The prompt's token ids, through the chat template where there is one."""
    if any("\ud800" <= c <= "\udfff" for c in text):  # what Python makes of bytes that are no text
        raise click.UsageError("the prompt is not valid UTF-8 text")
    template = tokenizer.has_chat_template and not flags["ignore_chat_template"]
    if template:
        messages = [{"role": "user", "content": text}]
        if flags["system_prompt"] is not None:
            messages.insert(0, {"role": "system", "content": flags["system_prompt"]})
        prefilled = flags["prefill_response"] is not None
        if prefilled:
            messages.append({"role": "assistant", "content": flags["prefill_response"]})
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=prefilled,
            add_generation_prompt=not prefilled,
            **flags["chat_template_config"],
        )
    tokens = tokenizer.encode(text, add_special_tokens=not template)
    if not tokens:
        raise click.UsageError("the prompt is empty")
    return tokens


def _summary(last: GenerationResponse) -> None:
    click.echo("=" * 10)
    click.echo(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
    click.echo(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
    click.echo(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
    stats = last.stats
    if stats and stats.num_draft_tokens:
        rates = " / ".join(f"{rate:.0%}" for rate in stats.acceptance)
        click.echo(
            f"MTP: {stats.num_draft_tokens} drafts per cycle, {stats.tokens_per_cycle:.2f} tokens per cycle, "
            f"accepted {rates}"
        )
