"""Run the commands of `mlx-mtp chat`: /help, /set, /save and the others."""

import base64
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ..machine.errors import first_line
from ..machine.paths import expanded
from ..pictures.prompt import opened
from . import conversation_file
from .chat_figures import LEGEND, count, mtp_state, totals
from .chat_settings import NAMES, change, settings
from .conversation import ChatLoop
from .terminal import dumb, printable, wrapped
from .together import follows

KEYS = (
    "Alt-Enter starts a new line, Tab completes commands and paths, Ctrl-R searches earlier messages, Ctrl-C stops "
    "an answer, Ctrl-D leaves."
)
LARGEST_FILE = 2_000_000  # bytes


class Command(NamedTuple):
    """A command: how it is written, its help, and the function that runs it and returns what is printed.

    argument: whether a text may follow its name.
    """

    usage: str
    help: str
    run: Callable[[ChatLoop, str], str]
    argument: bool = False


def execute(chat: ChatLoop, name: str, argument: str) -> str:
    """Run a command other than /exit; return what to print, "" for nothing.

    Raises ValueError for an unknown command, and ValueError or OSError if the command fails.
    """
    command = COMMANDS.get(name)
    if command is None:
        raise ValueError(f"unknown command {printable(name)[:30]}: /help lists them; a space before the / sends it")
    if argument and not command.argument:
        raise ValueError(f"{name} {printable(argument)[:30]}: {name} takes no argument")
    return command.run(chat, argument)


def completions() -> dict[str, Iterable[str] | None]:
    """Return the words that can follow each command, by command; None for a command that a path follows."""
    words: dict[str, Iterable[str] | None] = dict.fromkeys((*COMMANDS, "/exit"), ())
    return {**words, "/set": NAMES, "/mtp": ("on", "off"), **dict.fromkeys(("/file", "/image", "/save", "/load"))}


def named_files(names: str, command: str) -> list[Path]:
    """Return the paths that follow a command such as /image: one, as `named_file` reads it, if that file exists.

    Otherwise `names` is split as in a shell: spaces separate paths unless quoted or escaped, as in dropped files;
    with a quote that does not end it is one path. ValueError for an empty text.
    """
    only = named_file(names, command)
    if only.exists():
        return [only]
    try:
        each = shlex.split(names)
    except ValueError:  # a quote without its end
        return [only]
    return [expanded(name) for name in each]


def named_file(name: str, command: str) -> Path:
    """Return the path that follows a command such as /save, with ~ expanded; ValueError if none does.

    Unless that path exists, quotes around it or else backslashes before its spaces are removed, as terminals add them
    to a dropped file.
    """
    if not name:
        raise ValueError(f"{command}: name a file, as in {command} chat.json")
    plain = expanded(name)
    if plain.exists():
        return plain
    dropped = name[1:-1] if name[0] == name[-1] and name[0] in "'\"" and len(name) > 2 else name.replace("\\ ", " ")
    return expanded(dropped)


def _help(chat: ChatLoop, _: str) -> str:
    lines = [wrapped(line, indent=13) for line in HELP.splitlines()]
    return "\n".join([*lines, *map(wrapped, (KEYS, LEGEND) if chat.interactive else ())])


def _reset(chat: ChatLoop, _: str) -> str:
    chat.session.reset()
    chat.start_over()
    return "Started a new conversation."


def _retry(chat: ChatLoop, _: str) -> str:
    chat.replace_last(chat.session.last_message)
    return ""


def _edit(chat: ChatLoop, text: str) -> str:
    """Replace the last message's text by `text` and answer it; without `text` let the next prompt edit that message.

    Its files and pictures stay. Returns "". ValueError without a message, or without `text` if there is no terminal.
    """
    _ = chat.session.last_message  # raises without one
    if not text and not chat.interactive:
        raise ValueError("/edit: no terminal to edit in; write /edit TEXT")
    if text:
        chat.replace_last(chat.with_files(text, chat.sent))
    chat.edits = not text
    return ""


def _copy(chat: ChatLoop, _: str) -> str:
    """Copy the last answer to the clipboard by a program of CLIPBOARDS, else by an escape code for the terminal.

    Returns a confirmation, "" on a rank above 0. ValueError without an answer, or if neither way is possible.
    """
    answers = [message["content"] for message in chat.session.messages if message["role"] == "assistant"]
    if not answers:
        raise ValueError("/copy: there is no answer yet")
    if follows():
        return ""
    for display, command in CLIPBOARDS:
        if (display is None or os.environ.get(display)) and shutil.which(command[0]):
            try:
                subprocess.run(command, input=answers[-1].encode(), check=True, capture_output=True, timeout=10)
            except subprocess.SubprocessError as e:
                raise ValueError(f"/copy: {command[0]} failed ({first_line(e)})") from None
            return f"Copied {count(len(answers[-1]), 'character')}."
    if not chat.interactive or dumb():
        known = ", ".join(command[0] for _, command in CLIPBOARDS)
        raise ValueError(f"/copy: no clipboard; it needs one of {known}, and the display that this program uses")
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(answers[-1].encode()).decode()}\a")
    return f"Sent {count(len(answers[-1]), 'character')} to the terminal's clipboard."


def _file(chat: ChatLoop, name: str) -> str:
    """Add a text file to the next message; return a confirmation with its number of lines.

    ValueError without a name, on several ranks, and for a file that is not regular, is larger than LARGEST_FILE or is
    not text in UTF-8. OSError if the file cannot be read.
    """
    if not name:
        raise ValueError("/file: name a text file, as in /file notes.txt")
    if chat.ranks:
        raise ValueError(f"/file {printable(name)}: not supported on several ranks: not all of them have the file")
    file = named_file(name, "/file")
    if file.exists() and not file.is_file():
        kind = "a directory" if file.is_dir() else "not a regular file"
        raise ValueError(f"{printable(str(file))}: is {kind}; name a text file")
    if (size := file.stat().st_size) > LARGEST_FILE:
        raise ValueError(f"{printable(str(file))}: {size:,} bytes; at most {LARGEST_FILE:,} are allowed")
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{printable(str(file))}: not a text file in UTF-8") from None
    chat.files.append((file.name, text))
    return f"{printable(str(file))}: {count(len(text.splitlines()), 'line')} will go with the next message"


def _image(chat: ChatLoop, names: str) -> str:
    """Add pictures to the next message; return each one's number of tokens, and the number of all its pictures.

    ValueError without a name, and as `opened` raises it.
    """
    if not names:
        raise ValueError("/image: name a picture, as in /image photo.jpg, or drop one on the terminal")
    files = named_files(names, "/image")
    found = opened(chat.session.model, files)
    chat.pictures += found
    lines = [f"{printable(str(file))}: {count(p.rows, 'token')}" for file, p in zip(files, found, strict=True)]
    return "\n".join([*lines, f"{count(len(chat.pictures), 'picture')} will go with the next message"])


def _mtp(chat: ChatLoop, argument: str) -> str:
    """Return the state of drafting, after switching it if the argument is "on" or "off".

    ValueError for another argument that is not empty, and for "on" if no heads are loaded.
    """
    if argument not in ("on", "off", ""):
        raise ValueError(f"/mtp {printable(argument)[:30]}: expected on or off")
    if argument == "on" and not chat.drafts:
        raise ValueError("MTP stays off: no heads are loaded")
    if argument:
        chat.session.num_draft_tokens = chat.drafts if argument == "on" else 0
    return mtp_state(chat.session)


def _system(chat: ChatLoop, text: str) -> str:
    """Set the system prompt and return a confirmation; without a text return the current one."""
    if not text:
        return printable(chat.session.system_prompt or "No system prompt.")
    chat.session.system_prompt = text
    return "The next answer follows this system prompt."


def _set(chat: ChatLoop, argument: str) -> str:
    return change(chat.session, chat.penalties, argument) if argument else settings(chat.session, chat.penalties)


def _stats(chat: ChatLoop, _: str) -> str:
    return "\n".join(totals(chat.session, chat.turns))


def _save(chat: ChatLoop, name: str) -> str:
    file = named_file(name, "/save")
    if not follows():
        if file.exists() and not chat.confirm(f"{printable(str(file))} exists. Replace it?"):
            raise ValueError(f"{printable(str(file))}: exists and was not replaced; name a new file")
        conversation_file.save(file, chat.session)
    return f"{printable(str(file))}: {count(len(chat.session.messages), 'message')} saved"


def _load(chat: ChatLoop, name: str) -> str:
    file = named_file(name, "/load")
    if chat.ranks:
        raise ValueError(
            f"/load {printable(name)}: not supported on several ranks, because not all of them have the file"
        )
    conversation_file.load(file, chat.session)
    chat.start_over()
    return f"{printable(str(file))}: {count(len(chat.session.messages), 'message')} loaded"


CLIPBOARDS: tuple[tuple[str | None, list[str]], ...] = (
    (None, ["pbcopy"]),
    ("WAYLAND_DISPLAY", ["wl-copy"]),
    ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("DISPLAY", ["xsel", "--clipboard", "--input"]),
)
COMMANDS = {
    "/help": Command("/help", "this list (also: h)", _help),
    "/reset": Command("/reset", "start a new conversation (r)", _reset),
    "/retry": Command("/retry", "answer the last message again", _retry),
    "/edit": Command("/edit", "change the last message and answer it (/edit TEXT replaces it)", _edit, True),
    "/copy": Command("/copy", "copy the last answer to the clipboard", _copy),
    "/file": Command("/file PATH", "add a text file to the next message", _file, True),
    "/image": Command("/image PATH", "add pictures to the next message", _image, True),
    "/set": Command("/set NAME X", "set temperature, top_p, max_tokens ...; without NAME list them", _set, True),
    "/system": Command("/system TEXT", "set the system prompt; without TEXT show it", _system, True),
    "/save": Command("/save FILE", "save the conversation to a JSON file", _save, True),
    "/load": Command("/load FILE", "continue a saved conversation", _load, True),
    "/stats": Command("/stats", "totals of the conversation", _stats),
    "/mtp": Command(
        "/mtp on|off",
        "draft with the MTP heads or decode plainly: same text, other speed (with --kv-bits, near-ties may differ)",
        _mtp,
        True,
    ),
}
HELP = "\n".join(f"{each.usage:12} {each.help}" for each in COMMANDS.values()) + "\n/exit        leave (q)"
