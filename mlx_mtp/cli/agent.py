"""Define --install-agent and --uninstall-agent of `mlx-mtp serve`: the server starts at each login."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .options import checkpoint_path
from .together import check_flags

WORDS = "mlx_mtp.words"  # key of the command line's words in the context's `meta`
SECRETS = {"api_key": "MLX_MTP_API_KEY"}  # their environment variables; `ps` shows a command's words to all users
INSTALL, UNINSTALL = "install_agent", "uninstall_agent"
# Options whose value is a name, a file or a directory.
NAMES = ("models", "config_from", "adapter_path", "draft_model", "draft_vocab", "mtp_path", "vision_path")
CARRIED = ("HF_", "HUGGING_FACE_", "MLX_")  # start of environment variables that a unit takes over
ALSO_CARRIED = ("PYTHONPATH", "XDG_CACHE_HOME", "SSL_CERT_FILE")
LATE = 30  # seconds beyond --grace until the server is killed


class KeepsWords(click.Command):
    """A command whose context contains the list of its command line's words in `meta`, under WORDS."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)


def uninstall(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """End the agent, delete its unit and exit, if `value`; else do nothing.

    ClickException if there is no unit, and if the agent may not have ended, after its unit has been deleted.
    """
    if not value or ctx.resilient_parsing:
        return
    from ..serve.agent import manager

    own = manager()
    if not own.file.exists():
        raise click.ClickException(f"{own.file}: not there, so no agent is installed")
    try:
        own.remove()
    except ValueError as e:
        still = "the agent may still run; if so, end its `mlx-mtp serve`"
        raise click.ClickException(f"{own.file} is deleted, but {still}: {e}") from None
    click.echo(f"Ended the agent and deleted {own.file}")
    ctx.exit()


agent_options = (
    click.option(
        "--install-agent",
        is_flag=True,
        help="Start the server now and at each login, with the other options; replaces an earlier agent.",
    ),
    click.option(
        "--uninstall-agent",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=uninstall,
        help="End and remove the agent of --install-agent.",
    ),
)


def install_agent(ctx: click.Context, address: str) -> None:
    """Write a unit that runs this command line without --install-agent, and load it; download each --model before.

    An API key becomes a variable of the unit. address: the server's URL, without a final slash. UsageError on several
    ranks; ClickException if the unit is written but cannot be loaded; ValueError if a model is not found or the unit
    cannot contain the command line; OSError if the unit cannot be written.
    """
    check_flags(install_agent=True)
    for model in ctx.params["models"] or ([] if ctx.params["models_dir"] else [None]):
        checkpoint_path(model, code=ctx.params["trust_remote_code"], flags=ctx.params)
    from ..serve.agent import Program, manager

    own = manager()
    command = [sys.executable, "-m", "mlx_mtp", "serve", *_words(ctx)]
    own.write(Program(command, _environment(ctx), round(ctx.params["grace"]) + LATE))
    click.echo(f"Wrote {own.file}, which only you can read. It runs:\n  {shlex.join(command)}")
    try:
        own.load()
    except ValueError as e:
        raise click.ClickException(f"{own.file} is written, but could not be loaded: {e}") from None
    click.echo(f"The server starts now and at each login: curl {address}/health")
    click.echo(f"Its log: {own.reading}\nEnd and remove it: mlx-mtp serve --uninstall-agent")


def _words(ctx: click.Context) -> Iterator[str]:
    """Yield the words of the command line's options, with absolute paths, without API keys and agent_options."""
    given, _, _ = ctx.command.make_parser(ctx).parse_args(list(ctx.meta[WORDS]))
    for param in ctx.command.params:
        if param.name not in given or param.name in (INSTALL, UNINSTALL, *SECRETS):
            continue
        found: Any = given[param.name]
        for value in found if param.multiple else [found]:
            if getattr(param, "is_flag", False):
                yield (param.opts if value else param.secondary_opts)[0]
            else:
                yield from (param.opts[0], _absolute(param, value))


def _absolute(param: click.Parameter, value: str) -> str:
    """Return an option's value, but a path, of a file option or that exists, as an absolute path without "~"."""
    path = Path(os.path.expanduser(value))  # leaves "~name" of an unknown user: the value may be no path
    is_path = isinstance(param.type, click.Path) or (param.name in NAMES and path.exists())
    return os.path.abspath(path) if is_path else value


def _environment(ctx: click.Context) -> dict[str, str]:
    """Return the unit's environment variables by name: CARRIED, ALSO_CARRIED, proxies and API keys."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(CARRIED) or name in ALSO_CARRIED or name.lower().endswith("_proxy")
    }
    secrets = {variable: ctx.params[name] for name, variable in SECRETS.items() if ctx.params[name]}
    return dict(sorted((kept | secrets).items()))
