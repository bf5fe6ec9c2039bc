"""Options that the commands share: mlx_lm's names and defaults, and the drafting's own."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from ..demo import demo_path

# The commands set these, or need the text that comes without them.
RESERVED_KEYS = {
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}


def parse_template_config(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict:
    """Callback: a JSON object of the chat template's variables."""
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError) as e:
        raise click.BadParameter(f"not JSON: {e}") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object")
    if reserved := sorted(RESERVED_KEYS & parsed.keys()):
        raise click.BadParameter(f"{reserved[0]}: not a variable of the template, the command sets it")
    return parsed


def check_text(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Callback: Python makes lone surrogates of bytes that are no text."""
    if any("\ud800" <= c <= "\udfff" for c in value or ""):
        raise click.BadParameter("not valid UTF-8 text")
    return value


def read_prompt(value: str) -> str:
    """The text of a --prompt: standard input for '-', else with the escapes that mlx_lm knows."""
    text = sys.stdin.read() if value == "-" else value.replace("\\n", "\n").replace("\\t", "\t")
    if any("\ud800" <= c <= "\udfff" for c in text):  # what Python makes of bytes that are no text
        raise click.UsageError("the prompt is not valid UTF-8 text")
    return text


def check_max_tokens(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    """Callback: a text has at least one token."""
    if value == 0:
        raise click.BadParameter("0: allowed is 1 or more, or -1 for no limit")
    return value


def check_size(_ctx: click.Context, _param: click.Parameter, value: float | None) -> int | None:
    """Callback: GB as bytes."""
    if value is not None and not 0 <= value <= MOST_GB:  # not a number, to which click has no objection, is neither
        raise click.BadParameter(f"{value}: allowed is 0 to {MOST_GB} GB")
    return None if value is None else int(value * 1e9)


class GivenFile(click.Path):
    """A file to read, which has to be there. A device may never end, and a pipe never begin: neither is one."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.is_file():
            self.fail(f"{path} is not a file", param, ctx)
        return path


GIVEN = GivenFile()


def options(*decorators: Any) -> Any:
    """One decorator out of several click options, in the order they are listed in the help."""

    def apply(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


MOST_GB = 2**20
BITS = click.Choice(["2", "3", "4", "5", "6", "8"])

model_options = options(
    click.option("--model", help="Local directory or Hugging Face repository.  [default: the demo model]"),
    click.option("--trust-remote-code", is_flag=True, help="Let the tokenizer run code from the checkpoint."),
    click.option("--adapter-path", help="Directory of LoRA adapters."),
    click.option("--mtp/--no-mtp", default=True, help="Load the MTP heads and draft with them."),
    click.option("--draft-model", help="Directory or Hugging Face repository of an EAGLE-3 head for the model."),
    click.option("--draft-vocab", help="File of tokens to draft from; `mlx-mtp draft-vocab` writes one."),
    click.option("--mtp-path", help="File or directory to take the heads from."),
    click.option(
        "--kernels",
        type=click.Choice(["off", "exact", "fast"]),
        help="Metal kernels.  [default: MLX_MTP_KERNELS, else those that a trial finds right and faster]",
    ),
    click.option(
        "--num-draft-tokens", type=click.IntRange(0), help="Most drafts per cycle; 0 is plain.  [default: all heads]"
    ),
    click.option(
        "--adaptive/--no-adaptive", default=True, help="Draft as many as pays, by measurement, or always all."
    ),
    click.option(
        "--draft-p-min",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="Where it pays, verify only drafts of at least this probability.",
    ),
    click.option(
        "--prompt-lookup/--no-prompt-lookup",
        default=None,
        help="Draft what followed the last tokens before.  [default: where it pays]",
    ),
    click.option(
        "--compile/--no-compile",
        "compile_cycles",
        default=None,
        help="Record cycles and replay them.  [default: where a trial finds that faster; on a CPU never]",
    ),
)
sampling_options = options(
    click.option("--temp", type=click.FloatRange(0), default=0.0, help="Temperature; 0 is greedy."),
    click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, help="Nucleus sampling."),
    click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, help="Least share of the best probability."),
    click.option("--top-k", type=click.IntRange(0), default=0, help="Sample from the k best; 0 is all."),
    click.option("--xtc-probability", type=click.FloatRange(0, 1), default=0.0, help="How often XTC applies."),
    click.option("--xtc-threshold", type=click.FloatRange(0, 0.5), default=0.1, help="Threshold of XTC."),
    click.option("--min-tokens-to-keep", type=click.IntRange(1), default=1, help="Least candidates of min-p."),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of the draws."),
    click.option(
        "--draft-sampling",
        type=click.Choice(["greedy", "coupled", "rejection"]),
        default="coupled",
        help="Drafts at a temperature; with rejection a seed's text depends on the drafts.",
    ),
)
cache_file_option = click.option(
    "--prompt-cache-file",
    type=GIVEN,
    help="What `mlx-mtp cache-prompt` has read: the message begins with it.",
)
memory_options = options(
    click.option("--max-context", type=click.IntRange(1, 2**30), help="Most tokens of prompt and answer together."),
    click.option("--ignore-memory", is_flag=True, help="Load and generate even where there is not the memory."),
    click.option("--cache-limit", type=float, callback=check_size, help="Most GB of freed memory that MLX keeps."),
)
cache_options = options(
    click.option(
        "--max-kv-size",
        type=click.IntRange(1, 2**30),
        help="Full attention keeps this many positions: the first four, and the last.",
    ),
    click.option(
        "--prefill-step-size",
        type=click.IntRange(1),
        help="Prompt tokens per chunk.  [default: 2048, on a CPU 256]",
    ),
    click.option(
        "--kv-bits",
        type=BITS,
        help="Quantize the target's KV cache; near-ties may then depend on the drafts.",
    ),
    click.option("--mtp-kv-bits", type=BITS, help="Quantize the heads' KV caches."),
    click.option(
        "--kv-group-size",
        type=click.Choice(["32", "64", "128"]),
        help="Group size of quantized caches.  [default: 64, or 32 where the head size needs it]",
    ),
    click.option(
        "--quantized-kv-start",
        type=click.IntRange(0),
        default=5000,
        help="With --kv-bits: from this position on.",
    ),
)


def continues_cache(flags: dict[str, Any]) -> None:
    """Take from --prompt-cache-file which model it is of, where no other is named, and its end-of-text token."""
    if flags["prompt_cache_file"] is not None:
        from ..cache.file import saved_opening

        if opening := saved_opening(flags["prompt_cache_file"]):
            flags["model"], flags["eos_token"] = flags["model"] or opening.model, opening.eos_token


def load_model(flags: dict[str, Any]) -> tuple[Any, Any]:
    """(model, tokenizer) from the command line's flags; the demo where no model is named."""
    if not flags["mtp"] and flags["num_draft_tokens"]:
        raise click.UsageError(f"--num-draft-tokens {flags['num_draft_tokens']} needs heads, --no-mtp loads none")
    if flags["model"] is None and not flags["quiet"]:
        click.echo("No --model given: using the demo, a tiny Step-3.5 trained on Python's docs.", err=True)
    from .progress import loading, shows_progress

    shown = shows_progress(quiet=flags["quiet"])
    with loading(shown=shown):
        from ..checkpoint.load import load, resolve
        from ..machine.memory import cache_limit
    click.get_current_context().with_resource(cache_limit(flags.get("cache_limit")))
    path = resolve(demo_path() if flags["model"] is None else flags["model"])  # a download shows progress of its own
    with loading(shown=shown):
        return _load(load, path, flags)


def _load(load: Any, path: Any, flags: dict[str, Any]) -> tuple[Any, Any]:
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, untruly
    extra: dict[str, Any] = {"trust_remote_code": True} if flags["trust_remote_code"] else {}
    if flags.get("eos_token"):
        extra["eos_token"] = flags["eos_token"]
    if flags.get("use_default_chat_template"):
        extra["use_default_chat_template"] = True
    model, tokenizer = load(
        path,
        mtp=flags["mtp"],
        mtp_path=flags["mtp_path"],
        draft_model=flags["draft_model"],
        draft_vocab=flags["draft_vocab"],
        tokenizer_config=extra,
        adapter_path=flags["adapter_path"],
        kernels=flags["kernels"],
        budget=_budget(flags),
    )
    for token in flags.get("extra_eos_token", ()):
        _add_eos_token(tokenizer, token)
    return model, tokenizer


def _add_eos_token(tokenizer: Any, token: str) -> None:
    """Let a token that is given by name, or by number, end the text."""
    try:
        tokenizer.add_eos_token(token)
    except ValueError:  # of mlx-lm, or of text that is no UTF-8
        raise click.BadParameter(f"{token!r} is no token of this tokenizer", param_hint="--extra-eos-token") from None


def _budget(flags: dict[str, Any]) -> Any:
    """What there must be memory for: the context asked for, or one to begin with."""
    from ..decoding.memory_needs import UNCHECKED, Budget

    context, ignore = flags.get("max_context") or UNCHECKED, flags.get("ignore_memory", False)
    return Budget(context, flags.get("prefill_step_size") or default_step(), _layout(flags), ignore)


def _layout(flags: dict[str, Any]) -> dict[str, Any]:
    """How the command line's flags lay caches out; {} of a command without them."""
    numbers = ("kv_bits", "mtp_kv_bits", "kv_group_size", "max_kv_size", "quantized_kv_start")
    return {name: flags[name] and int(flags[name]) for name in numbers if name in flags}


def saved_cache(model: Any, flags: dict[str, Any]) -> Any:
    """The cache of --prompt-cache-file, or None; an error where the flags ask for another layout than it has."""
    file = flags["prompt_cache_file"]
    if file is None:
        return None
    from ..cache.file import load_prompt_cache

    cache = load_prompt_cache(file, model, check_memory=not flags["ignore_memory"])
    asked = _layout(flags)
    for name, found in cache.layout.items():
        if asked[name] is not None and asked[name] != found:
            flag = f"--{name.replace('_', '-')} {asked[name]}"
            raise click.UsageError(f"{flag}: the prompt cache in {file} was made with {found}")
    if model.mtp and not cache.heads and not flags["quiet"]:
        click.echo(f"{file} holds no state of the heads: decoding plainly.", err=True)
    return cache


def generation_options(model: Any, tokenizer: Any, flags: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Keyword arguments of `stream_generate` from the command line's flags; `cache` has been loaded, or is None."""
    names = ("max_tokens", "temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
    names += ("min_tokens_to_keep", "seed", "num_draft_tokens", "draft_sampling")
    names += ("adaptive", "draft_p_min", "prompt_lookup", "compile_cycles", "max_context")
    kept = {name: flags[name] for name in names}
    kept["check_memory"] = not flags["ignore_memory"]
    kept["prefill_step_size"] = flags["prefill_step_size"] or default_step()
    kept["xtc_special_tokens"] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    if cache is not None:
        return {**kept, "prompt_cache": cache}
    return {**kept, **cache_layout(model, flags)}


def cache_layout(model: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """The command line's arguments of `make_prompt_cache`."""
    from ..cache.prompt_cache import group_size_for

    layout = _layout(flags)
    return {**layout, "kv_group_size": layout["kv_group_size"] or group_size_for(model)}


def default_step() -> int:
    """Long chunks are for GPUs; on a CPU short ones are faster, and Ctrl-C need not wait for a long one."""
    import mlx.core as mx

    return 256 if mx.default_device() == mx.cpu else 2048
