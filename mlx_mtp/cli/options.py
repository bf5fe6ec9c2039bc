"""Define the options that commands share, with mlx_lm's names and defaults, and load the model they describe."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange, option

from ..checkpoint.chat_template import reserved_names
from ..demo import demo_path
from .gguf import gguf_options, transcoded
from .given_file import SIZE, GivenFile
from .grammar_options import grammar_of, grammar_options
from .together import check_prompt, group

BITS = Choice(["2", "3", "4", "5", "6", "8"])
KERNELS = Choice(["off", "exact", "matrix"])
SHARE, POSITIONS = FloatRange(0, 1), IntRange(1, 2**30)


def _parse_template_config(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict:
    """Return the JSON object of --chat-template-config, {} without it.

    Raises BadParameter for anything else, and for variables that the command sets.
    """
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError) as e:
        raise click.BadParameter(f"not JSON: {e}") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object")
    if parsed and (reserved := sorted(reserved_names() & parsed.keys())):
        raise click.BadParameter(f"{reserved[0]}: the command sets this variable; leave it out")
    return parsed


def _has_surrogates(text: str) -> bool:
    """Return whether a text has lone surrogates, Python's representation of bytes that are not UTF-8."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def check_text(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Return an option's value; raise BadParameter for bytes that are not UTF-8 text."""
    if _has_surrogates(value or ""):
        raise click.BadParameter("not valid UTF-8 text")
    return value


def read_prompt(value: str) -> str:
    """Return the text of --prompt: standard input for '-', else the value with \\n and \\t replaced.

    Raises UsageError for text that is not UTF-8, and for '-' on several ranks.
    """
    check_prompt(value)
    text = sys.stdin.read() if value == "-" else value.replace("\\n", "\n").replace("\\t", "\t")
    if _has_surrogates(text):
        raise click.UsageError("the prompt is not valid UTF-8 text")
    return text


def _check_max_tokens(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    """Return --max-tokens; raise BadParameter for 0."""
    if value == 0:
        raise click.BadParameter("0: allowed is 1 or more, or -1 for no limit")
    return value


def _wired_limit(_ctx: click.Context, _param: click.Parameter, value: str) -> int | str:
    """Return a number of MB in bytes, "auto" and "off" unchanged; raise BadParameter for other values."""
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


def _tree_rows(_ctx: click.Context, _param: click.Parameter, value: int | None) -> int | None:
    """Return --tree; raise BadParameter for 1."""
    if value == 1:
        raise click.BadParameter("1: allowed is 0, or 2 to 16")
    return value


def check_place(_ctx: click.Context, _param: click.Parameter, value: str) -> Path:
    """Return the path of a file to write; check its directory before a long task starts.

    Raises BadParameter if that is missing or not writable, or if the path exists and is no regular file. An existing
    file is not checked further.
    """
    path = Path(value)
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent}: no such directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path.parent} cannot be written to")
    if path.exists() and not path.is_file():
        raise click.BadParameter(f"{value} is not a file")
    return path


def refuse(flags: dict[str, Any], names: Iterable[str], why: str) -> None:
    """Raise UsageError for the first of these flags that has a value. why: its text, with {} for the option."""
    if given := next((name for name in names if flags[name]), None):
        raise click.UsageError(why.format(f"--{given.replace('_', '-')}"))


GIVEN = GivenFile()


def options(*decorators: Any) -> Any:
    """Combine click options into one decorator, in the order of the help."""
    return lambda command: reduce(lambda made, decorator: decorator(made), reversed(decorators), command)


def typed(name: str, kind: Any, default: Any, words: str) -> Any:
    """Return a click option whose value has this type. words: its help."""
    return option(name, type=kind, default=default, help=words)


MODEL = "Local directory, GGUF file or Hugging Face repository.  [default: the demo model]"
code_option = option(
    "--trust-remote-code", is_flag=True, help="Download the checkpoint's code and let the tokenizer run it."
)
checkpoint_options = options(option("--model", help=MODEL), code_option)
source_options = options(
    *gguf_options,
    option(
        "--adapter-path",
        multiple=True,
        help="Directory of LoRA adapters of mlx-lm or PEFT; repeatable: `serve` uses the one that a request names, "
        "other commands add them up.",
    ),
    option(
        "--mtp/--no-mtp",
        default=True,
        help="Load the MTP heads and draft with them. With a block drafter: draft with both, or with it alone.",
    ),
    option(
        "--draft-model",
        help="Directory or Hugging Face repository of a block drafter, EAGLE-3 or a small model, or demo-block.",
    ),
    option("--draft-vocab", help="File of the tokens to draft, from `mlx-mtp draft-vocab`."),
    option("--mtp-path", help="File or directory with the heads, such as the released checkpoint."),
    option("--vision/--no-vision", default=True, help="Read pictures with the model's vision tower, or refuse them."),
    option("--vision-path", help="File or directory with the vision tower, such as the released checkpoint."),
)
loading_options = options(
    source_options,
    typed(
        "--kernels",
        KERNELS,
        None,
        "Metal kernels to use.  [default: MLX_MTP_KERNELS, else those that are correct and faster in a trial]",
    ),
    option(
        "--wired-limit",
        default="auto",
        callback=_wired_limit,
        help="MB that the GPU keeps resident, off, or auto (only for a model that needs most of its memory).",
    ),
    typed(
        "--num-draft-tokens",
        IntRange(0),
        None,
        "Maximum drafts per cycle; 0 decodes plainly.  [default: by the kind of drafter]",
    ),
    option(
        "--adaptive/--no-adaptive",
        default=True,
        help="Adapt the number of drafts to measured costs, or always draft the maximum.",
    ),
    option(
        "--tree",
        default=None,
        type=IntRange(0, 16),
        callback=_tree_rows,
        help="Maximum rows of a pass whose drafts are a tree; 0: chains only.  [default: 16, if faster]",
    ),
    typed("--draft-p-min", SHARE, 0.0, "Verify only drafts of at least this probability, if that is faster."),
    option(
        "--prompt-lookup/--no-prompt-lookup",
        default=None,
        help="Draft the tokens that followed an earlier copy of the last ones.  [default: if faster]",
    ),
    option(
        "--compile/--no-compile",
        "compile_cycles",
        default=None,
        help="Record cycles and replay them.  [default: on a GPU, unless a trial finds it slower]",
    ),
    option(
        "--check-rows", is_flag=True, help="Check rows of one pass against the same rows alone, and limit drafts."
    ),
)
model_options = options(checkpoint_options, loading_options)
system_prompt_option = option("--system-prompt", callback=check_text, help="System message of the chat template.")
no_template_option = option(
    "--ignore-chat-template", is_flag=True, help="Use the prompt unchanged, without the chat template."
)
template_config_option = option(
    "--chat-template-config", callback=_parse_template_config, help="JSON object of variables for the chat template."
)


def text_options(max_tokens: int) -> Any:
    """Return the options for sampling, grammars and the maximum number of tokens, by default `max_tokens`."""
    modes, drafted = Choice(["greedy", "coupled"]), "the likeliest tokens, or tokens drawn with the target's noise"
    length = {"type": IntRange(-1), "callback": _check_max_tokens, "default": max_tokens}
    return options(
        option("--max-tokens", "-m", **length, help="Maximum new tokens; -1 is no limit."),
        typed("--temp", FloatRange(0), 0.0, "Temperature; 0 is greedy."),
        typed("--top-p", SHARE, 1.0, "Nucleus sampling: probability mass to sample from."),
        typed("--min-p", SHARE, 0.0, "Minimum probability relative to the best token's."),
        typed("--top-k", IntRange(0), 0, "Sample from the k most likely tokens; 0 is all."),
        typed("--xtc-probability", SHARE, 0.0, "Probability that XTC is applied."),
        typed("--xtc-threshold", FloatRange(0, 0.5), 0.1, "XTC's probability threshold."),
        typed("--min-tokens-to-keep", IntRange(1), 1, "Minimum number of tokens that min-p keeps."),
        typed("--seed", IntRange(0, 2**63 - 1), None, "Seed of the draws."),
        typed("--draft-sampling", modes, "coupled", f"Drafts at a temperature above 0: {drafted}."),
        *grammar_options,
    )


cache_options = options(
    typed(
        "--max-kv-size", POSITIONS, None, "Maximum positions of full attention: the first four and the latest ones."
    ),
    typed(
        "--prefill-step-size", IntRange(1), None, "Prompt tokens per prefill chunk.  [default: chosen at the load]"
    ),
    typed("--kv-bits", BITS, None, "Quantize the target's KV cache; near-ties may then depend on drafts."),
    typed("--mtp-kv-bits", BITS, None, "Quantize the heads' KV caches."),
    typed(
        "--kv-group-size",
        Choice(["32", "64", "128"]),
        None,
        "Group size of quantized caches.  [default: 64, or 32 if the head size needs it]",
    ),
    typed("--quantized-kv-start", IntRange(0), 5000, "With --kv-bits: first quantized position."),
    typed("--max-context", POSITIONS, None, "Maximum tokens of prompt and answer together."),
    option("--ignore-memory", is_flag=True, help="Load and generate even if memory is too small."),
    option("--cache-limit", type=SIZE, help="Maximum GB of freed memory that MLX keeps."),
)


def checkpoint_path(model: str | None, *, code: bool = False, flags: dict[str, Any] | None = None) -> Path:
    """Return the directory of the checkpoint of --model, by default the demo; download it if it is on the hub.

    code: also its Python files. flags: the command's, for a GGUF file, which is transcoded if that is not cached.
    """
    from ..checkpoint.gguf.cached import is_gguf

    found = own_path(model, code=code, quiet=bool((flags or {}).get("quiet")))
    return transcoded(str(found), flags or {}) if is_gguf(found) else found


def own_path(model: str | None, *, code: bool = False, quiet: bool = False) -> Path:
    """Return the directory or GGUF file of --model, by default the demo; download it if it is on the hub.

    code: also its Python files. quiet: do not announce a download of smollm2.
    """
    from ..checkpoint.files import SMOLLM2, local, resolve
    from ..checkpoint.gguf.cached import is_gguf
    from .pull import pull_smollm2

    if model == SMOLLM2 and local(model) is None:
        return pull_smollm2(quiet=quiet)
    return Path(demo_path() if model is None else model if is_gguf(model) else resolve(model, code=code))


def load_model(flags: dict[str, Any]) -> tuple[Any, Any]:
    """Load and return the model that the options describe, by default the demo, and its tokenizer.

    Raises UsageError or BadParameter for options that do not fit together or with the tokenizer, and all errors of
    `load`. --cache-limit then holds until the command ends.
    """
    if not flags["mtp"] and flags["draft_model"] is None and flags["num_draft_tokens"]:
        raise click.UsageError(f"--num-draft-tokens {flags['num_draft_tokens']} needs heads, but --no-mtp loads none")
    if flags["model"] is None and not flags["quiet"]:
        click.echo("No --model given: using the demo, a tiny Step-3.5 trained on Python's docs.", err=True)
    from .progress import loading, shows_progress

    shown = shows_progress(quiet=flags["quiet"])
    with loading(shown=shown):
        from ..checkpoint.cure import NeverDrafts
        from ..checkpoint.load import load
        from ..decoding.memory_needs import UNCHECKED, Budget
        from ..decoding.options import max_chunk
        from ..machine.memory import cache_limit
    warnings.filterwarnings("ignore", category=NeverDrafts)
    click.get_current_context().with_resource(cache_limit(flags.get("cache_limit")))
    code = bool(flags.get("trust_remote_code"))
    path = checkpoint_path(flags["model"], code=code, flags=flags)  # a download shows its own progress
    context, step = flags.get("max_context") or UNCHECKED, flags.get("prefill_step_size") or max_chunk()
    budget = Budget(context, step, cache_layout(flags), flags.get("ignore_memory", False))
    with loading(shown=shown):
        logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings about long prompts are false
        extra = ("trust_remote_code", "eos_token", "use_default_chat_template")
        given = ("vision", "vision_path", "mtp", "mtp_path", "draft_model", "draft_vocab", "adapter_path", "kernels")
        model, tokenizer = load(
            path,
            tensor_group=group(),
            tokenizer_config={name: flags[name] for name in extra if flags.get(name)},
            budget=budget,
            **{name: flags[name] for name in (*given, "wired_limit")},
        )
    for token in flags.get("extra_eos_token", ()):
        try:
            tokenizer.add_eos_token(token)
        except ValueError:  # from mlx-lm, or text that is not UTF-8
            wrong = f"{token!r} is not a token of this tokenizer"
            raise click.BadParameter(wrong, param_hint="--extra-eos-token") from None
    if flags.get("check_rows"):
        from ..decoding.row_check import check_rows

        check_rows(model, **cache_layout(flags))
    return model, tokenizer


def cache_layout(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `make_prompt_cache` that flags contain, None if not given; {} without such flags."""
    numbers = ("kv_bits", "mtp_kv_bits", "kv_group_size", "max_kv_size", "quantized_kv_start")
    return {name: flags[name] and int(flags[name]) for name in numbers if name in flags}


def sampling_flags(flags: dict[str, Any]) -> list[str]:
    """Return the names of the flags that are fields of `Sampling`."""
    from ..decoding.sampling import Sampling

    return [field.name for field in fields(Sampling) if field.name in flags]


def generation_options(tokenizer: Any, flags: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Return the keyword arguments of `stream_generate`. cache: a loaded one, or None.

    With a cache, its own layout counts, and flags of the layout are ignored.
    """
    names = ("max_tokens", "max_context", "seed", "num_draft_tokens", "draft_sampling", "adaptive", "draft_p_min")
    names += ("prompt_lookup", "compile_cycles", "tree")
    return {
        **{name: flags[name] for name in (*names, *sampling_flags(flags))},
        "grammar": grammar_of(flags),
        "check_memory": not flags["ignore_memory"],
        "prefill_step_size": flags["prefill_step_size"],
        "xtc_special_tokens": [*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        **({"prompt_cache": cache} if cache is not None else cache_layout(flags)),
    }
