"""Keep a conversation in a JSON file and read it back: its messages, and how many answers the session has given."""

import json
from pathlib import Path
from typing import Any

from ..machine.atomic import write_whole
from ..machine.errors import one_line
from ..session import ChatSession

FORMAT = 1
LAYOUT = 'expected {"messages": [{"role": "user", "content": "..."}, ...]}'


def save(file: Path, session: ChatSession) -> None:
    """Write a session's conversation, in place of another one at most.

    Raises ValueError where the file holds anything else, OSError where it cannot be written.
    """
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file}: no directory {file.parent}")
    if file.is_file():
        try:
            read(file)
        except ValueError:
            raise ValueError(f"{file}: already there and no conversation; name a new file") from None
    found = {"format": FORMAT, "answers": session.answers, "messages": session.messages}
    write_whole(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def load(file: Path, session: ChatSession) -> None:
    """Let a session go on with the conversation of a file; ValueError or OSError leaves it as it was."""
    messages, answers = read(file)
    with one_line(f"{file}: the chat template refuses this conversation", (ValueError,)):
        session.resume(messages, answers)


def read(file: Path) -> tuple[list[dict[str, str]], int]:
    """Read the messages and the number of answers given, of what `save` wrote or of a bare list of messages.

    Raises ValueError, in one line, for what is no conversation: [system], then user and assistant in turn.
    """
    if file.exists() and not file.is_file():  # a device may never end
        raise ValueError(f"{file}: not a file")
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
        raise ValueError(f"{file}: message {len(messages)} has no answer; the last one is to be an assistant's")
    answers = whole.get("answers", sum(message["role"] == "assistant" for message in messages))
    if type(answers) is not int or answers < 0:
        raise ValueError(f"{file}: answers is {answers!r}; allowed are integers from 0 on")
    return messages, answers


def _check(where: str, message: Any, role: str) -> None:
    """Raise ValueError for what is no message of this role."""
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        raise ValueError(f'{where}: expected {{"role": "{role}", "content": "..."}}')
    if message["role"] != role:
        raise ValueError(f"{where}: role is {message['role']!r}, expected {role!r}")
    content = message["content"]
    if not isinstance(content, str) or content != content.encode("utf-8", "replace").decode():
        raise ValueError(f"{where}: content is no text")
