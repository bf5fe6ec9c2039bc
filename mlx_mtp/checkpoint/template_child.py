"""Render chat templates in a process of its own, which `template_process.py` starts and may kill.

Standard input is a socket: one JSON request per line arrives on it, and one JSON answer per line is sent back. The
process ends when the socket is closed, and kills itself if a template runs for more than DEADLINE + 1 seconds.
"""

import json
import resource
import signal
import socket
import sys

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..machine.errors import first_line
from .template_limits import DEADLINE, MOST_MEMORY, MOST_MESSAGE, MOST_TEXT, TOO_LONG, TOO_MUCH_MEMORY


class TemplateTokenizer:
    """The attributes of a tokenizer that transformers reads to render a template; it needs no vocabulary."""

    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template
    get_chat_template = PreTrainedTokenizerBase.get_chat_template

    def __init__(self, chat_template: str | dict[str, str] | None, special_tokens: dict[str, str]):
        self.chat_template, self.special_tokens_map = chat_template, special_tokens


def answer_to(line: bytes) -> bytes:
    """Return the answer to a request: "text", "error" (the template raised it) or "stopped" (it broke a limit)."""
    try:
        request = json.loads(line)
        tokenizer = TemplateTokenizer(request["template"], request["special_tokens"])
        text = str(tokenizer.apply_chat_template(request["messages"], **request["options"]))
        return encoded({"text": text} if len(text) <= MOST_TEXT else {"stopped": TOO_LONG})
    except MemoryError:
        return encoded({"stopped": TOO_MUCH_MEMORY})
    except Exception as e:
        return encoded({"error": first_line(e)[:MOST_MESSAGE]})


def encoded(answer: dict[str, str]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def limit_memory() -> None:
    """Limit the process to MOST_MEMORY bytes more than it has mapped now; Linux only."""
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    if sys.platform == "linux" and "--unlimited" not in sys.argv:
        limit_memory()
    connection = socket.socket(fileno=0)
    connection.sendall(b"{}\n")  # ready
    for line in connection.makefile("rb"):
        signal.setitimer(signal.ITIMER_REAL, DEADLINE + 1)  # a computation in C is interrupted only by this
        answer = answer_to(line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(answer)


if __name__ == "__main__":
    main()
