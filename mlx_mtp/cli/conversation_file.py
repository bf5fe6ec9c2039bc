"""Save a conversation to a JSON file and load it: its messages and the number of answers given."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from ..machine.atomic import write_whole
from ..machine.errors import one_line
from ..pictures.library import pillow
from ..pictures.prompt import opened
from ..session import ChatSession

FORMAT = 1
LAYOUT = 'expected {"messages": [{"role": "user", "content": "..."}, ...]}'


def save(file: Path, session: ChatSession) -> None:
    """Write a session's conversation to a file; a file that contains a conversation is replaced.

    Raises ValueError if the file contains anything else or its directory is missing, and for pictures of a prompt
    cache, which does not contain their images; OSError if the file cannot be read or written.
    """
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file}: no directory {file.parent}")
    if file.is_file():
        try:
            read(file)
        except ValueError:
            raise ValueError(f"{file}: exists and contains no conversation; name a new file") from None
    messages = [_with_urls(message) for message in session.messages]
    found = {"format": FORMAT, "answers": session.answers, "messages": messages}
    write_whole(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def load(file: Path, session: ChatSession) -> None:
    """Replace a session's conversation by a file's; after ValueError or OSError the session is unchanged."""
    messages, answers = read(file)
    for number, message in enumerate(messages, 1):
        if urls := message.pop("pictures", None):
            with one_line(f"{file}: message {number}", (ValueError,)):
                message["pictures"] = tuple(opened(session.model, urls))
    with one_line(f"{file}: the chat template refuses this conversation", (ValueError,)):
        session.resume(messages, answers)


def _with_urls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a session's message with its pictures as `data:` URLs of PNG files; ValueError without their images."""
    if not (pictures := message.get("pictures")):
        return message
    urls = []
    for picture in pictures:
        if picture.image is None:
            raise ValueError("a picture of the prompt cache cannot be saved: the cache does not contain its image")
        file = io.BytesIO()
        pillow().fromarray(picture.image.pixels).save(file, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    return {**message, "pictures": urls}


def read(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Read messages and the number of answers from a file of `save`, or from a JSON list of messages.

    Messages: an optional system message, then zero or more pairs of a user's message, whose "pictures" are `data:`
    URLs, and an assistant's. A file without a number of answers has one per assistant's message. Raises a one-line
    ValueError for other contents, and for a path that is no regular file; OSError if the file cannot be read.
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
    """Raise ValueError unless this is a message of this role, with a text of valid Unicode.

    A user's may have "pictures", a list of `data:` URLs. where: the file and the message's number, for errors.
    """
    keys = {"role", "content"} | ({"pictures"} if role == "user" else set())
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= keys:
        raise ValueError(f'{where}: expected {{"role": "{role}", "content": "..."}}')
    if message["role"] != role:
        raise ValueError(f"{where}: role is {message['role']!r}, expected {role!r}")
    content = message["content"]
    if not isinstance(content, str) or content != content.encode("utf-8", "replace").decode():
        raise ValueError(f"{where}: content is not a string of valid Unicode")
    urls = message.get("pictures", [])
    if not isinstance(urls, list) or not all(isinstance(url, str) and url.startswith("data:") for url in urls):
        raise ValueError(f"{where}: pictures is not a list of data: URLs")
