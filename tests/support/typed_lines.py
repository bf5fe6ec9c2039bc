"""A chat whose lines a test types, without a terminal."""

from mlx_mtp.cli.chat_commands import execute
from mlx_mtp.cli.conversation import ChatLoop
from mlx_mtp.cli.terminal import MessageReader
from mlx_mtp.session import ChatSession


class TypedLines(MessageReader):
    """A reader of given lines."""

    def __init__(self):
        super().__init__(interactive=False, values={})
        self.lines = []

    def __call__(self, default=""):
        return self.lines.pop(0) if self.lines else None


def chat_of(model, max_tokens):
    """Return a chat of an empty conversation with a model and its tokenizer."""
    session = ChatSession(*model, max_tokens=max_tokens)
    return ChatLoop(session, TypedLines(), execute, name="", quiet=True, penalties={})


def typed(chat, *lines):
    """Answer or run the lines, up to the end of input."""
    chat.read.lines = list(lines)
    chat.run()
