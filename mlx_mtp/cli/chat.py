"""Define `mlx-mtp chat` and its flags; `conversation.py` has the conversation itself."""

from contextlib import nullcontext
from typing import Any

import click

from ..machine.paths import expanded
from . import options
from .advice import advised_and_not_given
from .saved_cache import continues_cache, saved_cache, saved_cache_option
from .terminal import MessageReader, hidden_typing, is_interactive


@click.command(context_settings={"default_map": {"seed": 0}})
@options.model_options
@options.system_prompt_option
@options.text_options(max_tokens=-1)
@options.template_config_option
@options.cache_options
@saved_cache_option
@click.option("--pipeline", is_flag=True, help="Ignored, as by mlx_lm.chat in a single process.")
@click.option("--quiet", is_flag=True, help="Print the answers only: no notices, footers or progress.")
def chat(**flags: Any) -> None:
    """Chat with a model. /help lists the commands; q, r and h work as in mlx_lm.chat."""
    continues_cache(flags)
    with hidden_typing() if is_interactive() else nullcontext():  # what is typed during the load is for the prompt
        model, tokenizer = options.load_model(flags)
    from ..serve.frames import add_reasoning_marks
    from ..session import ChatSession
    from .chat_commands import completions, execute
    from .chat_settings import PENALTIES, apply_penalties
    from .conversation import ChatLoop

    advised = advised_and_not_given(flags)
    flags |= advised
    penalties = {name: value for name, value in advised.items() if name in PENALTIES}
    kept = options.generation_options(tokenizer, flags, saved_cache(model, flags))
    kept |= {"system_prompt": flags["system_prompt"], "template_config": flags["chat_template_config"]}
    session = ChatSession(model, tokenizer, **kept)
    apply_penalties(session, penalties)
    add_reasoning_marks(tokenizer)
    name = flags["model"] or "the demo"
    if expanded(name).is_dir():
        name = expanded(name).resolve().name
    sampling = ", ".join(f"{name} {value}" for name, value in advised.items())
    notice = f"generation_config.json: {sampling}" if sampling else ""
    reader = MessageReader(interactive=is_interactive(), patient=not session.ranks, values=completions())
    ChatLoop(session, reader, execute, name=name, quiet=flags["quiet"], penalties=penalties).run(notice)
