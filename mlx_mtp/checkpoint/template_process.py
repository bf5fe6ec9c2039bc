"""Render a tokenizer's chat template in a process of its own, which is killed if the template breaks a limit.

A template is a program from the checkpoint. It can loop, allocate, or compute `9**(9**9)`, which holds Python's lock
in C: no thread of the process in which it runs can stop it.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from functools import partial
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .template_limits import DEADLINE, MOST_MEMORY, TOO_MUCH_MEMORY, TOO_SLOW, TemplateStopped

PROCESSES = 2  # a slow template occupies one; the other then still renders for everybody else
START = 120.0  # seconds that a process may take to import transformers
POLL = 0.1  # seconds between two reads of a process's resident memory
LIMITS_ITSELF = sys.platform == "linux"  # macOS ignores RLIMIT_AS


def isolate(tokenizer: Any) -> None:
    """Let an mlx-lm tokenizer render its Jinja template in another process from now on.

    A template that Python code renders stays in this process: it is mlx-lm's or transformers' own code, or the
    checkpoint's, which was trusted. Variables must be values of JSON. Rendering then raises `TemplateStopped`, and
    ValueError for a template's errors.
    """
    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    if getattr(type(plain), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template:
        plain.apply_chat_template = partial(_apply, plain)


def _apply(plain: Any, messages: list[Any], *, tokenize: bool = True, **options: Any) -> Any:
    """Return the rendered text, or its tokens, like `apply_chat_template` of transformers with return_dict=False."""
    options = {**options, "tokenize": False}
    request = {"template": plain.chat_template, "special_tokens": plain.special_tokens_map}
    answer = processes().render(json.dumps({**request, "messages": messages, "options": options}).encode() + b"\n")
    if "stopped" in answer:
        raise _stopped(answer["stopped"])
    if "error" in answer:
        raise ValueError(answer["error"])
    return plain.encode(answer["text"], add_special_tokens=False) if tokenize else answer["text"]


@functools.cache
def processes() -> "Processes":
    """Return this process's `Processes`; the first call starts one of them and does not wait for it."""
    return Processes()


class Processes:
    """PROCESSES rendering processes, each started when it is first needed and replaced when it has ended.

    They end with this process, however it ends, since the sockets on which they wait are then closed.
    """

    def __init__(self):
        self._free = threading.Semaphore(PROCESSES)
        self._idle = deque[Process | None]([None] * (PROCESSES - 1) + [Process()])

    def render(self, request: bytes) -> dict[str, str]:
        """Return a process's answer to a request, a line of JSON: see `answer_to` in `template_child.py`.

        Raises TemplateStopped if the process had to be killed, or has ended.
        """
        with self._free:
            process = self._idle.pop()
            try:
                process = process or Process()
                answer = process.answer(request)
            except BaseException:
                if process:
                    process.end()
                self._idle.appendleft(None)
                raise
            self._idle.append(process)  # the next request uses the one that is warm
        return answer


class Process:
    """One rendering process. It is in a session of its own, so that Ctrl-C in the terminal does not reach it."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        self._ready = False
        command = [sys.executable, "-P", "-m", f"{__package__}.template_child"]
        with theirs:
            self._process = subprocess.Popen(
                command if LIMITS_ITSELF else [*command, "--unlimited"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )

    def answer(self, request: bytes) -> dict[str, str]:
        """Send a request and return its answer; after an exception the process is in an unknown state: call `end`."""
        try:
            if not self._ready:
                self._receive(START)
                self._ready = True
            self._socket.settimeout(DEADLINE)
            self._socket.sendall(request)
            return self._receive(DEADLINE)
        except TimeoutError:
            raise _stopped(TOO_SLOW) from None
        except OSError as e:
            raise TemplateStopped(f"the process that renders chat templates has ended ({e})") from e

    def _receive(self, limit: float) -> dict[str, str]:
        """Return the next line of JSON; TimeoutError after `limit` seconds, OSError if the process has ended.

        TemplateStopped if it uses too much memory and does not limit that itself.
        """
        end, received = time.monotonic() + limit, bytearray()
        while not received.endswith(b"\n"):
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left, POLL))
            with contextlib.suppress(TimeoutError):
                piece = self._socket.recv(2**20)
                if not piece:
                    raise OSError(f"exit code {self._process.wait()}")
                received += piece
                continue
            if not LIMITS_ITSELF and self._ready and resident(self._process.pid) > MOST_MEMORY:
                raise _stopped(TOO_MUCH_MEMORY)
        return json.loads(received.decode("utf-8", "surrogatepass"))

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


def _stopped(why: str) -> TemplateStopped:
    return TemplateStopped(f"the chat template was stopped: it {why}")


def resident(process: int) -> int:
    """Return the bytes of a process in physical memory, 0 if it has ended."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True)
    return int(done.stdout or 0) * 1024
