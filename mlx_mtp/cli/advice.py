"""Read the sampling values that a checkpoint advises in generation_config.json, and warn of too long prompts."""

import json
import warnings
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .options import checkpoint_path

ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def advised_sampling(path: Path) -> dict[str, Any]:
    """Return the numbers of ADVISED in a checkpoint's generation_config.json by name, temperature as "temp".

    {} if the file is missing or invalid, or its do_sample is false.
    """
    try:
        found = json.loads((path / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("do_sample") is False:
        return {}
    sampling = {name: found[name] for name in ADVISED if type(found.get(name)) in (int, float)}
    return {"temp" if name == "temperature" else name: value for name, value in sampling.items()}


def advised_and_not_given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the checkpoint of --model advises and the command line does not set, by name."""
    context = click.get_current_context()
    found = advised_sampling(checkpoint_path(flags["model"], flags=flags))
    given = {name for name in flags if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    return {name: value for name, value in found.items() if name not in given}


def warn_of_length(model: Any, tokens: int) -> None:
    """Warn of a prompt with more tokens than the maximum positions in the model's config.json, if it states them."""
    from ..decoding.memory_needs import stated_positions

    positions = stated_positions(model)
    if positions and tokens > positions:
        found = f"the prompt has {tokens:,} tokens, more than the model's {positions:,} positions"
        warnings.warn(f"{found}; shorten the prompt, or the text may be meaningless", stacklevel=2)
