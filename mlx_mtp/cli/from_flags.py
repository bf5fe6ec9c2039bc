"""Load the model and the caches that a command's flags ask for, and collect its arguments of the library."""

import logging
from typing import Any

import click

from ..demo import demo_path


def continues_cache(flags: dict[str, Any]) -> None:
    """Take from --prompt-cache-file which model it is of, where no other is named, and its end-of-text token."""
    if flags["prompt_cache_file"] is not None:
        from ..cache.file import saved_opening

        if prefix := saved_opening(flags["prompt_cache_file"]):
            flags["model"], flags["eos_token"] = flags["model"] or prefix.model, prefix.eos_token


def load_model(flags: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model and its tokenizer; the demo's where no model is named."""
    if not flags["mtp"] and flags["num_draft_tokens"]:
        raise click.UsageError(f"--num-draft-tokens {flags['num_draft_tokens']} needs heads, --no-mtp loads none")
    if flags["model"] is None and not flags["quiet"]:
        click.echo("No --model given: using the demo, a tiny Step-3.5 trained on Python's docs.", err=True)
    from .progress import loading, shows_progress

    shown = shows_progress(quiet=flags["quiet"])
    with loading(shown=shown):
        from ..checkpoint.files import resolve
        from ..checkpoint.load import load
        from ..decoding.memory_needs import UNCHECKED, Budget
        from ..machine.memory import cache_limit
    click.get_current_context().with_resource(cache_limit(flags.get("cache_limit")))
    path = resolve(demo_path() if flags["model"] is None else flags["model"])  # a download shows progress of its own
    context, ignore = flags.get("max_context") or UNCHECKED, flags.get("ignore_memory", False)
    step = flags.get("prefill_step_size") or default_step()
    with loading(shown=shown):
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, untruly
        extra = ("trust_remote_code", "eos_token", "use_default_chat_template")
        given = ("mtp", "mtp_path", "draft_model", "draft_vocab", "adapter_path", "kernels")
        model, tokenizer = load(
            path,
            tokenizer_config={name: flags[name] for name in extra if flags.get(name)},
            budget=Budget(context, step, _layout(flags), ignore),
            **{name: flags[name] for name in given},
        )
    for token in flags.get("extra_eos_token", ()):
        try:
            tokenizer.add_eos_token(token)
        except ValueError:  # of mlx-lm, or of text that is no UTF-8
            hint = "--extra-eos-token"
            raise click.BadParameter(f"{token!r} is no token of this tokenizer", param_hint=hint) from None
    return model, tokenizer


def _layout(flags: dict[str, Any]) -> dict[str, Any]:
    """Say how the flags lay caches out; {} for a command without such flags."""
    numbers = ("kv_bits", "mtp_kv_bits", "kv_group_size", "max_kv_size", "quantized_kv_start")
    return {name: flags[name] and int(flags[name]) for name in numbers if name in flags}


def saved_cache(model: Any, flags: dict[str, Any]) -> Any:
    """Load the cache of --prompt-cache-file, if any; an error where the flags ask for another layout than it has."""
    file = flags["prompt_cache_file"]
    if file is None:
        return None
    from ..cache.file import load_prompt_cache

    cache = load_prompt_cache(file, model, check_memory=not flags["ignore_memory"])
    asked = {name: value for name, value in _layout(flags).items() if value is not None}
    for name, found in cache.layout.items():
        if asked.get(name, found) != found:
            flag = f"--{name.replace('_', '-')} {asked[name]}"
            raise click.UsageError(f"{flag}: the prompt cache in {file} was made with {found}")
    if model.mtp and not cache.heads and not flags["quiet"]:
        click.echo(f"{file} holds no state of the heads: decoding plainly.", err=True)
    return cache


def generation_options(model: Any, tokenizer: Any, flags: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Collect the keyword arguments of `stream_generate`; `cache` has been loaded, or is None."""
    names = ("max_tokens", "max_context", "temp", "top_p", "min_p", "top_k", "xtc_probability", "xtc_threshold")
    names += ("min_tokens_to_keep", "seed", "num_draft_tokens", "draft_sampling", "adaptive", "draft_p_min")
    names += ("prompt_lookup", "compile_cycles")
    return {
        **{name: flags[name] for name in names},
        "check_memory": not flags["ignore_memory"],
        "prefill_step_size": flags["prefill_step_size"] or default_step(),
        "xtc_special_tokens": [*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        **({"prompt_cache": cache} if cache is not None else cache_layout(model, flags)),
    }


def cache_layout(model: Any, flags: dict[str, Any]) -> dict[str, Any]:
    """Collect the arguments of `make_prompt_cache`."""
    from ..cache.prompt_cache import group_size_for

    layout = _layout(flags)
    return {**layout, "kv_group_size": layout["kv_group_size"] or group_size_for(model)}


def default_step() -> int:
    """Choose a chunk of a prompt: long for GPUs; on a CPU short ones are faster, and soon interrupted."""
    import mlx.core as mx

    return 256 if mx.default_device() == mx.cpu else 2048
