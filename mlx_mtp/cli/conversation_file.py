"""Save a conversation to a JSON file and load it: its messages and the number of answers given."""

import json
from pathlib import Path
from typing import Any

from ..machine.atomic import write_whole
from ..machine.errors import one_line
from ..session import ChatSession

FORMAT = 1
LAYOUT = 'expected {"messages": [{"role": "user", "content": "..."}, ...]}'


def save(file: Path, session: ChatSession) -> None:
    """Write a session's conversation to a file, which must not exist yet or contain a conversation.

    Raises ValueError if it contains anything else or its directory is missing, OSError if it cannot be read or
    written.
    """
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file}: no directory {file.parent}")
    if file.is_file():
        try:
            read(file)
        except ValueError:
            raise ValueError(f"{file}: exists and contains no conversation; name a new file") from None
    found = {"format": FORMAT, "answers": session.answers, "messages": session.messages}
    write_whole(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def load(file: Path, session: ChatSession) -> None:
    """Replace a session's conversation by a file's; after ValueError or OSError the session is unchanged."""
    messages, answers = read(file)
    with one_line(f"{file}: the chat template refuses this conversation", (ValueError,)):
        session.resume(messages, answers)


def read(file: Path) -> tuple[list[dict[str, str]], int]:
    """Read messages and the number of answers from a file of `save`, or from a JSON list of messages.

    Without a number, it is that of the assistant's messages. Raises a one-line ValueError for no regular file, and
    unless the messages are [system], then user and assistant in turn up to an assistant's, or none; OSError if the
    file cannot be read.
    """
    if file.exists() and not file.is_file():  # a device may never end
        raise ValueError(f"{file}: not a regular file")
    with one_line(f"{file}: not a conversation, no JSON", (ValueError, RecursionError)):
        found = json.loads(file.read_text("utf-8"))
    whole = found if isinstance(found, dict) else {"messages": found}
    messages = whole.get("messages")
    if not isinstance(messages, list) or whole.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{file}: not a conversation, {LAYOUT}")
    roles = ["user", "assistant"] * len(messages)
    if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system":
        roles.insert(0, "system")
    for number, (message, role) in enumerate(zip(messages, roles, strict=False), 1):
        _check(f"{file}: message {number}", message, role)
    if messages and messages[-1]["role"] == "user":
        raise ValueError(f"{file}: message {len(messages)} has no answer; the last message must be an assistant's")
    answers = whole.get("answers", sum(message["role"] == "assistant" for message in messages))
    if type(answers) is not int or answers < 0:
        raise ValueError(f"{file}: answers is {answers!r}; expected an integer of at least 0")
    return messages, answers


def _check(where: str, message: Any, role: str) -> None:
    """Raise ValueError unless this is a message of this role, with a valid text and no other keys."""
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        raise ValueError(f'{where}: expected {{"role": "{role}", "content": "..."}}')
    if message["role"] != role:
        raise ValueError(f"{where}: role is {message['role']!r}, expected {role!r}")
    content = message["content"]
    if not isinstance(content, str) or content != content.encode("utf-8", "replace").decode():
        raise ValueError(f"{where}: content is not a string of valid Unicode")
