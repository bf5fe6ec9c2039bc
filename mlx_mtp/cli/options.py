"""Define the options that commands share, with mlx_lm's names and defaults, and load what they ask for."""

import json
import logging
import os
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange, option

from ..cache.prompt_prefix import RESERVED_KEYS
from ..demo import demo_path
from .gguf import gguf_options, transcoded
from .together import check_prompt, group, own_file

MOST_GB = 2**20
BITS = Choice(["2", "3", "4", "5", "6", "8"])
KERNELS = Choice(["off", "exact", "fast"])
SHARE, POSITIONS = FloatRange(0, 1), IntRange(1, 2**30)


def _parse_template_config(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict:
    """Read a JSON object of the chat template's variables."""
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError) as e:
        raise click.BadParameter(f"not JSON: {e}") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object")
    if reserved := sorted(RESERVED_KEYS & parsed.keys()):
        raise click.BadParameter(f"{reserved[0]}: not a variable of the template, the command sets it")
    return parsed


def _has_surrogates(text: str) -> bool:
    """Look for lone surrogates, which Python makes of bytes that are no text."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def check_text(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Refuse bytes that are no text."""
    if _has_surrogates(value or ""):
        raise click.BadParameter("not valid UTF-8 text")
    return value


def read_prompt(value: str) -> str:
    """Return the text of a --prompt: standard input for '-', else with the escapes that mlx_lm knows."""
    check_prompt(value)
    text = sys.stdin.read() if value == "-" else value.replace("\\n", "\n").replace("\\t", "\t")
    if _has_surrogates(text):
        raise click.UsageError("the prompt is not valid UTF-8 text")
    return text


def _check_max_tokens(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    """Refuse a text of no tokens."""
    if value == 0:
        raise click.BadParameter("0: allowed is 1 or more, or -1 for no limit")
    return value


def _in_bytes(_ctx: click.Context, _param: click.Parameter, value: float | None) -> int | None:
    """Convert GB to bytes."""
    if value is not None and not 0 <= value <= MOST_GB:  # not a number, to which click has no objection, is neither
        raise click.BadParameter(f"{value}: allowed is 0 to {MOST_GB} GB")
    return None if value is None else int(value * 1e9)


def _wired_limit(_ctx: click.Context, _param: click.Parameter, value: str) -> int | str:
    """Convert MB to bytes; the words stay."""
    if not value.isdecimal():
        if value not in ("auto", "off"):
            raise click.BadParameter(f"{value!r}: allowed are MB, 'auto' and 'off'")
        return value
    from ..machine.wired import check_wired_limit

    try:
        check_wired_limit(limit := int(value) * 10**6)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None
    return limit


def check_place(_ctx: click.Context, _param: click.Parameter, value: str) -> Path:
    """Check that a file can be written there, before anything is read that takes a while."""
    path = Path(value)
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent}: no such directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path.parent} cannot be written to")
    if path.exists() and not path.is_file():
        raise click.BadParameter(f"{value} is not a file")
    return path


class GivenFile(click.Path):
    """A file to read, which has to be there. A device may never end, and a pipe never begin: neither is one."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.is_file():
            self.fail(f"{path} is not a file", param, ctx)
        return path


class SavedCache(GivenFile):
    """A prompt cache, of which each rank has a file of its own beside the one that is named."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(own_file(Path(value)), param, ctx)
        return Path(value)


GIVEN = GivenFile()


def options(*decorators: Any) -> Any:
    """Make one decorator of several click options, in the order they are listed in the help."""
    return lambda command: reduce(lambda made, decorator: decorator(made), reversed(decorators), command)


def typed(name: str, kind: Any, default: Any, words: str) -> Any:
    """Declare an option with a value of this click type; `words` are its help."""
    return option(name, type=kind, default=default, help=words)


checkpoint_options = options(
    option("--model", help="Local directory, GGUF file or Hugging Face repository.  [default: the demo model]"),
    option(
        "--trust-remote-code", is_flag=True, help="Let the tokenizer run code from the checkpoint; downloads it, too."
    ),
)
model_options = options(
    checkpoint_options,
    *gguf_options,
    option("--adapter-path", help="Directory of LoRA adapters of mlx-lm or PEFT."),
    option("--mtp/--no-mtp", default=True, help="Load the MTP heads and draft with them."),
    option(
        "--draft-model", help="Directory or Hugging Face repository of a drafter: EAGLE-3, or mlx-vlm's MTP heads."
    ),
    option("--draft-vocab", help="File of tokens to draft from; `mlx-mtp draft-vocab` writes one."),
    option("--mtp-path", help="File or directory to take the heads from, also the released checkpoint."),
    typed(
        "--kernels",
        KERNELS,
        None,
        "Metal kernels.  [default: MLX_MTP_KERNELS, else those that a trial finds right and faster]",
    ),
    option(
        "--wired-limit",
        default="auto",
        callback=_wired_limit,
        help="MB that the GPU keeps resident, off, or auto: only for a model that needs most of its memory.",
    ),
    typed("--num-draft-tokens", IntRange(0), None, "Most drafts per cycle; 0 is plain.  [default: all heads]"),
    option("--adaptive/--no-adaptive", default=True, help="Draft as many as pays, by measurement, or always all."),
    typed("--draft-p-min", SHARE, 0.0, "Where it pays, verify only drafts of at least this probability."),
    option(
        "--prompt-lookup/--no-prompt-lookup",
        default=None,
        help="Draft what followed the last tokens before.  [default: where it pays]",
    ),
    option(
        "--compile/--no-compile",
        "compile_cycles",
        default=None,
        help="Record cycles and replay them.  [default: on a GPU, unless a trial finds it slower]",
    ),
)
system_prompt_option = option("--system-prompt", callback=check_text, help="System message of the chat template.")
no_template_option = option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
template_config_option = option(
    "--chat-template-config", callback=_parse_template_config, help="JSON object of template variables."
)


def text_options(max_tokens: int) -> Any:
    """Make the options of a text's length, of which this is the default, and of sampling."""
    modes, drafted = Choice(["greedy", "coupled"]), "the likeliest tokens, or draws with the target's noise"
    length = {"type": IntRange(-1), "callback": _check_max_tokens, "default": max_tokens}
    return options(
        option("--max-tokens", "-m", **length, help="Most tokens; -1 is no limit."),
        typed("--temp", FloatRange(0), 0.0, "Temperature; 0 is greedy."),
        typed("--top-p", SHARE, 1.0, "Nucleus sampling."),
        typed("--min-p", SHARE, 0.0, "Least share of the best probability."),
        typed("--top-k", IntRange(0), 0, "Sample from the k best; 0 is all."),
        typed("--xtc-probability", SHARE, 0.0, "How often XTC applies."),
        typed("--xtc-threshold", FloatRange(0, 0.5), 0.1, "Threshold of XTC."),
        typed("--min-tokens-to-keep", IntRange(1), 1, "Least candidates of min-p."),
        typed("--seed", IntRange(0, 2**63 - 1), None, "Seed of the draws."),
        typed("--draft-sampling", modes, "coupled", f"Drafts at a temperature: {drafted}."),
    )


cache_options = options(
    typed(
        "--max-kv-size", POSITIONS, None, "Full attention keeps this many positions: the first four, and the last."
    ),
    typed(
        "--prefill-step-size",
        IntRange(1),
        None,
        "Prompt tokens per chunk.  [default: chosen at the load]",
    ),
    typed("--kv-bits", BITS, None, "Quantize the target's KV cache; near-ties may then depend on the drafts."),
    typed("--mtp-kv-bits", BITS, None, "Quantize the heads' KV caches."),
    typed(
        "--kv-group-size",
        Choice(["32", "64", "128"]),
        None,
        "Group size of quantized caches.  [default: 64, or 32 where the head size needs it]",
    ),
    typed("--quantized-kv-start", IntRange(0), 5000, "With --kv-bits: from this position on."),
    typed("--max-context", POSITIONS, None, "Most tokens of prompt and answer together."),
    option("--ignore-memory", is_flag=True, help="Load and generate even where there is not the memory."),
    option("--cache-limit", type=float, callback=_in_bytes, help="Most GB of freed memory that MLX keeps."),
)
saved_cache_option = option(
    "--prompt-cache-file", type=SavedCache(), help="What `mlx-mtp cache-prompt` has read: the message begins with it."
)


def continues_cache(flags: dict[str, Any]) -> None:
    """Take from --prompt-cache-file which model it is of, where no other is named, and its end-of-text token."""
    if flags["prompt_cache_file"] is not None:
        from ..cache.file import saved_opening

        if prefix := saved_opening(own_file(flags["prompt_cache_file"])):
            flags["model"], flags["eos_token"] = flags["model"] or prefix.model, prefix.eos_token


def checkpoint_path(model: str | None, *, code: bool = False, flags: dict[str, Any] | None = None) -> Path:
    """Find the checkpoint that --model names, the demo where it names none; what is on the hub is downloaded.

    code: with its Python files. flags: the command's; a GGUF file is transcoded once, as they say.
    """
    from ..checkpoint.files import resolve
    from ..checkpoint.gguf.cached import is_gguf

    if model is not None and is_gguf(model):
        return transcoded(model, flags or {})
    return resolve(demo_path() if model is None else model, code=code)


def load_model(flags: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model and its tokenizer; the demo's where no model is named."""
    if not flags["mtp"] and flags["num_draft_tokens"]:
        raise click.UsageError(f"--num-draft-tokens {flags['num_draft_tokens']} needs heads, --no-mtp loads none")
    if flags["model"] is None and not flags["quiet"]:
        click.echo("No --model given: using the demo, a tiny Step-3.5 trained on Python's docs.", err=True)
    from .progress import loading, shows_progress

    shown = shows_progress(quiet=flags["quiet"])
    with loading(shown=shown):
        from ..checkpoint.load import load
        from ..decoding.memory_needs import UNCHECKED, Budget
        from ..decoding.options import largest_step
        from ..machine.memory import cache_limit
    click.get_current_context().with_resource(cache_limit(flags.get("cache_limit")))
    code = bool(flags.get("trust_remote_code"))
    path = checkpoint_path(flags["model"], code=code, flags=flags)  # a download shows progress of its own
    context, step = flags.get("max_context") or UNCHECKED, flags.get("prefill_step_size") or largest_step()
    budget = Budget(context, step, cache_layout(flags), flags.get("ignore_memory", False))
    with loading(shown=shown):
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, untruly
        extra = ("trust_remote_code", "eos_token", "use_default_chat_template")
        given = ("mtp", "mtp_path", "draft_model", "draft_vocab", "adapter_path", "kernels", "wired_limit")
        model, tokenizer = load(
            path,
            tensor_group=group(),
            tokenizer_config={name: flags[name] for name in extra if flags.get(name)},
            budget=budget,
            **{name: flags[name] for name in given},
        )
    for token in flags.get("extra_eos_token", ()):
        try:
            tokenizer.add_eos_token(token)
        except ValueError:  # of mlx-lm, or of text that is no UTF-8
            wrong = f"{token!r} is no token of this tokenizer"
            raise click.BadParameter(wrong, param_hint="--extra-eos-token") from None
    return model, tokenizer


def cache_layout(flags: dict[str, Any]) -> dict[str, Any]:
    """Collect the arguments of `make_prompt_cache`; {} for a command without such flags."""
    numbers = ("kv_bits", "mtp_kv_bits", "kv_group_size", "max_kv_size", "quantized_kv_start")
    return {name: flags[name] and int(flags[name]) for name in numbers if name in flags}


def saved_cache(model: Any, flags: dict[str, Any]) -> Any:
    """Load the cache of --prompt-cache-file, if any; an error where the flags ask for another layout than it has."""
    file = flags["prompt_cache_file"]
    if file is None:
        return None
    from ..cache.file import load_prompt_cache

    cache = load_prompt_cache(file, model, check_memory=not flags["ignore_memory"])
    asked = {name: value for name, value in cache_layout(flags).items() if value is not None}
    for name, found in cache.layout.items():
        if asked.get(name, found) != found:
            flag = f"--{name.replace('_', '-')} {asked[name]}"
            raise click.UsageError(f"{flag}: the prompt cache in {file} was made with {found}")
    if model.mtp and not cache.heads and not flags["quiet"]:
        click.echo(f"{file} holds no state of the heads: decoding plainly.", err=True)
    return cache


def generation_options(tokenizer: Any, flags: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Collect the keyword arguments of `stream_generate`; `cache` has been loaded, or is None."""
    names = ("max_tokens", "max_context", "temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
    names += ("min_tokens_to_keep", "seed", "num_draft_tokens", "draft_sampling", "adaptive", "draft_p_min")
    names += ("prompt_lookup", "compile_cycles")
    return {
        **{name: flags[name] for name in names},
        "check_memory": not flags["ignore_memory"],
        "prefill_step_size": flags["prefill_step_size"],
        "xtc_special_tokens": [*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        **({"prompt_cache": cache} if cache is not None else cache_layout(flags)),
    }
