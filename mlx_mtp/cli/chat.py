"""`mlx-mtp chat`: its flags. The conversation itself is in `conversation.py`."""

from pathlib import Path
from typing import Any

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
    sampling_options,
    saved_cache,
)


@click.command(context_settings={"default_map": {"seed": 0}})
@model_options
@click.option("--system-prompt", callback=check_text, help="System message of the chat template.")
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(-1),
    callback=check_max_tokens,
    default=256,
    help="Most tokens; -1 is no limit.",
)
@sampling_options
@click.option("--chat-template-config", callback=parse_template_config, help="JSON object of template variables.")
@cache_options
@memory_options
@cache_file_option
@click.option("--pipeline", is_flag=True, help="Ignored, as by mlx_lm.chat in a single process.")
@click.option("--quiet", is_flag=True, help="Print the answers only: no notices, footers or progress.")
def chat(**flags: Any) -> None:
    """Chat with a model. /help lists the commands; q, r and h work as in mlx_lm.chat."""
    continues_cache(flags)
    model, tokenizer = load_model(flags)
    from ..session import ChatSession
    from .conversation import Chat

    session = ChatSession(
        model,
        tokenizer,
        system_prompt=flags["system_prompt"],
        template_config=flags["chat_template_config"],
        **generation_options(model, tokenizer, flags, saved_cache(model, flags)),
    )
    name = flags["model"] or "the demo"
    if Path(name).expanduser().is_dir():
        name = Path(name).expanduser().resolve().name
    Chat(session, name=name, quiet=flags["quiet"]).run()
