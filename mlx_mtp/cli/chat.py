"""Define `mlx-mtp chat` and its flags; `conversation.py` has the conversation itself."""

from pathlib import Path
from typing import Any

import click

from . import options


@click.command(context_settings={"default_map": {"seed": 0}})
@options.model_options
@options.system_prompt_option
@options.text_options(max_tokens=256)
@options.template_config_option
@options.cache_options
@options.saved_cache_option
@click.option("--pipeline", is_flag=True, help="Ignored, as by mlx_lm.chat in a single process.")
@click.option("--quiet", is_flag=True, help="Print the answers only: no notices, footers or progress.")
def chat(**flags: Any) -> None:
    """Chat with a model. /help lists the commands; q, r and h work as in mlx_lm.chat."""
    options.continues_cache(flags)
    model, tokenizer = options.load_model(flags)
    from ..session import ChatSession
    from .conversation import Chat

    kept = options.generation_options(tokenizer, flags, options.saved_cache(model, flags))
    kept |= {"system_prompt": flags["system_prompt"], "template_config": flags["chat_template_config"]}
    session = ChatSession(model, tokenizer, **kept)
    name = flags["model"] or "the demo"
    if Path(name).expanduser().is_dir():
        name = Path(name).expanduser().resolve().name
    Chat(session, name=name, quiet=flags["quiet"]).run()
