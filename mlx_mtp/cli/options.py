"""Options that the commands share: mlx_lm's names and defaults, and the drafting's own."""

import json
import logging
from typing import Any

import click

from ..demo import demo_path
from ..load import load
from ..prompt_cache import load_prompt_cache


def parse_json(_ctx: click.Context, param: click.Parameter, value: str | None) -> dict:
    """Callback of options whose value is a JSON object."""
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
    click.option("--model", help="Local directory or Hugging Face repository.  [default: the demo model]"),
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
        "--quantized-kv-start",
        type=click.IntRange(0),
        default=5000,
        help="With --kv-bits: from this position on.",
    ),
)


def load_model(flags: dict[str, Any]) -> tuple[Any, Any]:
    """(model, tokenizer) from the command line's flags; the demo where no model is named."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, untruly
    extra = {"trust_remote_code": True} if flags["trust_remote_code"] else {}
    if flags.get("use_default_chat_template"):
        extra["use_default_chat_template"] = True
    if not flags["mtp"] and flags["num_draft_tokens"]:
        raise click.UsageError(f"--num-draft-tokens {flags['num_draft_tokens']} needs heads, --no-mtp loads none")
    if flags["model"] is None:
        click.echo("No --model given: using the built-in demo, a tiny Step-3.5 trained on Python's docs.", err=True)
    model, tokenizer = load(
        flags["model"] or demo_path(),
        mtp=flags["mtp"],
        mtp_path=flags["mtp_path"],
        tokenizer_config=extra,
        adapter_path=flags["adapter_path"],
    )
    for token in flags.get("extra_eos_token", ()):
        tokenizer.add_eos_token(token)
    return model, tokenizer


def generation_options(model: Any, tokenizer: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `stream_generate` from the command line's flags."""
    names = ("max_tokens", "temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
    kept = {name: flags[name] for name in (*names, "min_tokens_to_keep", "seed", "prefill_step_size")}
    kept["xtc_special_tokens"] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    kept["num_draft_tokens"] = flags["num_draft_tokens"]
    file = flags.get("prompt_cache_file")
    if file is not None:
        return {**kept, "prompt_cache": load_prompt_cache(file, model)}
    bits = {name: flags[name] and int(flags[name]) for name in ("kv_bits", "mtp_kv_bits", "kv_group_size")}
    return {
        **kept,
        **bits,
        "max_kv_size": flags["max_kv_size"],
        "quantized_kv_start": flags["quantized_kv_start"],
    }
