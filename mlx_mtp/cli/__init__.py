"""Command line. With `bench/` the only code that prints."""

import sys
import warnings
from typing import Any

import click

from .. import __version__
from .chat import chat
from .generate import generate


class OneLine(click.Group):
    """A group whose errors are one line on stderr and exit code 2, with no usage text and no traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: click.echo(f"warning: {message}", err=True)
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            super().main(*args, **{**options, "standalone_mode": False})
        except click.ClickException as e:
            click.echo(f"error: {e.format_message()}", err=True)
            sys.exit(2)
        except ValueError as e:
            click.echo(f"error: {e}", err=True)
            sys.exit(2)
        except (click.Abort, KeyboardInterrupt):
            click.echo(err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(141)


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="mlx-mtp")
def main() -> None:
    """Exact multi-token-prediction decoding on MLX: the same text, sooner."""


main.add_command(generate)
main.add_command(chat)
