"""Define the options that constrain answers to a grammar."""

from typing import Any

import click
from click import option

from ..machine.errors import first_line
from .given_file import GivenFile

FLAGS = {"json_schema": "--json-schema", "json": "--json", "regex": "--regex", "grammar": "--grammar"}
FILE = GivenFile(16_000_000)


grammar_options = (
    option("--json-schema", type=FILE, default=None, help="File of a JSON schema that the answer must fit."),
    option("--json", is_flag=True, help="The answer is any JSON value."),
    option("--regex", default=None, help="Regular expression that the whole answer must match."),
    option("--grammar", type=FILE, default=None, help="File of a grammar in llguidance's dialect of Lark."),
)


def grammar_of(flags: dict[str, Any]) -> Any:
    """Return the grammar that a command's flags name, None if they name none.

    UsageError for more than one or an unreadable file, ValueError for an invalid grammar.
    """
    given = [name for name in FLAGS if flags[name] not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        raise click.UsageError(f"{FLAGS[given[0]]} and {FLAGS[given[1]]}: give one of them")
    from .. import grammar

    name, value = given[0], flags[given[0]]
    if name == "json":
        return grammar.json()
    if name == "regex":
        return grammar.regex(value)
    try:
        text = value.read_text("utf-8")
    except UnicodeDecodeError:
        raise click.UsageError(f"{FLAGS[name]} {value}: not a text file in UTF-8") from None
    except OSError as e:
        raise click.UsageError(f"{FLAGS[name]} {value}: cannot be read ({first_line(e)})") from None
    try:
        return grammar.json_schema(text) if name == "json_schema" else grammar.lark(text)
    except ValueError as e:
        raise ValueError(f"{FLAGS[name]} {value}: {first_line(e).removeprefix('json_schema: ')}") from e
