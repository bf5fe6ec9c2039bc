"""Command line: mlx_lm's flags and output, and the drafting's own. With `bench/` the only code that prints."""

import json
import sys
import warnings
from typing import Any

import click
import mlx.core as mx

from . import __version__
from .generate import GenerationResponse, stream_generate
from .load import load
from .prompt_cache import load_prompt_cache


class OneLine(click.Group):
    """A group whose errors are one line on stderr and exit code 2, with no usage text and no traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: click.echo(f"warning: {message}", err=True)
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            super().main(*args, **{**options, "standalone_mode": False})
        except click.ClickException as e:
            click.echo(f"error: {e.format_message()}", err=True)
            sys.exit(2)
        except ValueError as e:
            click.echo(f"error: {e}", err=True)
            sys.exit(2)
        except (click.Abort, KeyboardInterrupt):
            click.echo(err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(141)


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="mlx-mtp")
def main() -> None:
    """Exact multi-token-prediction decoding on MLX: the same text, sooner."""


def _json(_ctx: click.Context, param: click.Parameter, value: str | None) -> dict:
    try:
        parsed = json.loads(value or "{}")
    except json.JSONDecodeError as e:
        raise click.BadParameter(f"not JSON: {e}") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object")
    return parsed


def options(*decorators: Any) -> Any:
    """One decorator out of several click options, in the order they are listed in the help."""

    def apply(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


BITS = click.Choice(["2", "3", "4", "5", "6", "8"])

model_options = options(
    click.option("--model", required=True, help="Local directory or Hugging Face repository."),
    click.option("--trust-remote-code", is_flag=True, help="Let the tokenizer run code from the checkpoint."),
    click.option("--adapter-path", help="Directory of LoRA adapters."),
    click.option("--mtp/--no-mtp", default=True, help="Load the MTP heads and draft with them."),
    click.option("--mtp-path", help="File or directory to take the heads from."),
    click.option("--num-draft-tokens", type=click.IntRange(0), help="Drafts per cycle.  [default: all heads]"),
)
sampling_options = options(
    click.option("--temp", type=click.FloatRange(0), default=0.0, help="Temperature; 0 is greedy."),
    click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, help="Nucleus sampling."),
    click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, help="Least share of the best probability."),
    click.option("--top-k", type=click.IntRange(0), default=0, help="Sample from the k best; 0 is all."),
    click.option("--xtc-probability", type=click.FloatRange(0, 1), default=0.0, help="How often XTC applies."),
    click.option("--xtc-threshold", type=click.FloatRange(0, 0.5), default=0.1, help="Threshold of XTC."),
    click.option("--min-tokens-to-keep", type=click.IntRange(1), default=1, help="Least candidates of min-p."),
    click.option("--seed", type=int, help="Seed of the draws."),
)
cache_options = options(
    click.option("--max-kv-size", type=click.IntRange(1), help="Full attention keeps this many last positions."),
    click.option("--prefill-step-size", type=click.IntRange(1), default=2048, help="Prompt tokens per chunk."),
    click.option("--kv-bits", type=BITS, help="Quantize the target's KV cache."),
    click.option("--mtp-kv-bits", type=BITS, help="Quantize the heads' KV caches."),
    click.option("--kv-group-size", type=click.Choice(["32", "64", "128"]), default="64", help="Group size."),
    click.option(
        "--quantized-kv-start", type=click.IntRange(0), default=5000, help="With --kv-bits: from this position on."
    ),
)


@main.command()
@model_options
@click.option("--extra-eos-token", multiple=True, help="One more token that ends the text; repeatable.")
@click.option("--system-prompt", help="System message of the chat template.")
@click.option("--prompt", "-p", default="hello", help="The message; '-' reads standard input.")
@click.option("--prefill-response", help="Beginning of the answer.")
@click.option("--max-tokens", "-m", type=click.IntRange(-1), default=100, help="Most tokens; -1 is no limit.")
@sampling_options
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--use-default-chat-template", is_flag=True, help="Use the tokenizer class's own template.")
@click.option("--chat-template-config", callback=_json, help="JSON object of template variables.")
@click.option("--verbose", type=bool, default=True, help="False prints the text only.")
@cache_options
@click.option("--prompt-cache-file", type=click.Path(exists=True, dir_okay=False), help="Continue a saved cache.")
@click.option("--report", is_flag=True, help="Say what was loaded.")
def generate(**flags: Any) -> None:
    """Print the model's continuation of, or answer to, a prompt."""
    if flags["max_tokens"] == 0:
        raise click.BadParameter("0: allowed is 1 or more, or -1 for no limit", param_hint="--max-tokens")
    text = sys.stdin.read() if flags["prompt"] == "-" else flags["prompt"].replace("\\n", "\n").replace("\\t", "\t")
    model, tokenizer = _load(flags)
    if flags["report"]:
        click.echo(str(model.report()))
    prompt = _tokens(tokenizer, text, flags)
    responses = stream_generate(model, tokenizer, prompt, **_generation(model, tokenizer, flags))
    if flags["verbose"]:
        click.echo("=" * 10)
    last = None
    for last in responses:
        click.echo(last.text, nl=False)
    click.echo()
    if flags["verbose"] and last:
        _summary(last)


def _load(flags: dict[str, Any]) -> tuple[Any, Any]:
    extra = {"trust_remote_code": True} if flags["trust_remote_code"] else {}
    if flags.get("use_default_chat_template"):
        extra["use_default_chat_template"] = True
    if not flags["mtp"] and flags["num_draft_tokens"]:
        raise click.UsageError(f"--num-draft-tokens {flags['num_draft_tokens']} needs heads, --no-mtp loads none")
    model, tokenizer = load(
        flags["model"],
        mtp=flags["mtp"],
        mtp_path=flags["mtp_path"],
        tokenizer_config=extra,
        adapter_path=flags["adapter_path"],
    )
    for token in flags.get("extra_eos_token", ()):
        tokenizer.add_eos_token(token)
    return model, tokenizer


def _tokens(tokenizer: Any, text: str, flags: dict[str, Any]) -> list[int]:
    """The prompt's token ids, through the chat template where there is one."""
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


def _generation(model: Any, tokenizer: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `stream_generate` from the command line's flags."""
    names = ("max_tokens", "temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
    kept = {name: flags[name] for name in (*names, "min_tokens_to_keep", "seed", "prefill_step_size")}
    kept["xtc_special_tokens"] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    kept["num_draft_tokens"] = flags["num_draft_tokens"]
    file = flags.get("prompt_cache_file")
    if file is not None:
        return {**kept, "prompt_cache": load_prompt_cache(file, model)}
    bits = {name: flags[name] and int(flags[name]) for name in ("kv_bits", "mtp_kv_bits", "kv_group_size")}
    return {**kept, **bits, "max_kv_size": flags["max_kv_size"], "quantized_kv_start": flags["quantized_kv_start"]}


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
