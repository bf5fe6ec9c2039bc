"""Send requests of many clients to `mlx-mtp serve`: check every answer, the status codes and the memory.

    python bench/serve_load.py [--requests 2000] [--clients 32]

The demo's server runs in its own process with a prefix cache of 50 MB. Whole answers and streams of three APIs,
greedy
and sampled, must equal those from before the load (log probabilities to 0.001: a BLAS rounds a row differently in
batches). In between, clients disconnect during the prefill or in the middle of a stream, or send invalid JSON.
Resident
memory is read after each eighth.
"""

import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import click
import numpy as np
from serve import QUESTIONS, free_port, server

DRAWN = {"temperature": 1.2, "seed": 7}
CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {}),
    (CHAT, {"stream": True, **DRAWN}),
    (CHAT, {"n": 2, "logprobs": True, "stop": ["the "], **DRAWN}),
    (MESSAGES, {}),
    (MESSAGES, {"stream": True, **DRAWN}),
    (COMPLETIONS, {"stream": True, "repetition_penalty": 1.3}),
)
RUDE = ("no JSON", "gone while its prompt is read", "gone in the middle of a stream")


def body_of(kind: int, question: int) -> tuple[str, dict[str, Any]]:
    """Return a request's path and body."""
    path, more = KINDS[kind]
    text = QUESTIONS[question]
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return path, {**body, "max_tokens": 30, **more}


def post(port: int, path: str, body: str) -> http.client.HTTPResponse:
    """Send a request; the response is not read yet, and reading it closes its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, body, {"content-type": "application/json", "connection": "close"})
    return connection.getresponse()


class Answer(NamedTuple):
    """An answer: its status, its content without varying parts, and the numbers in it."""

    status: int
    text: str
    numbers: list[float]

    def same(self, other: "Answer") -> bool:
        alike = len(self.numbers) == len(other.numbers) and np.allclose(
            self.numbers, other.numbers, rtol=0, atol=1e-3
        )
        return bool(alike) and self[:2] == other[:2]


def answered(port: int, kind: int, question: int) -> Answer:
    """Send a request and read the answer."""
    path, body = body_of(kind, question)
    with post(port, path, json.dumps(body)) as response:
        text = response.read().decode()
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    events = [content_of(each) for each in found or [json.loads(text)]]
    events, numbers = json.dumps([each for each in events if each]), []  # empty events only keep a stream alive
    return Answer(response.status, json.dumps(json.loads(events, parse_float=partial(_number, numbers))), numbers)


def _number(numbers: list[float], text: str) -> None:
    numbers.append(float(text))


def content_of(event: dict[str, Any]) -> Any:
    """Return the content of an event or a whole answer."""
    return event.get("choices") or event.get("content") or event.get("delta") or event.get("error")


def rude(port: int, i: int) -> int:
    """Behave as a bad client; return the status."""
    if RUDE[i % 3] == "no JSON":
        with post(port, CHAT, '{"messages": [') as response:
            return response.status
    long = RUDE[i % 3] == "gone while its prompt is read"
    text = " ".join(f"{i} {j}" for j in range(200)) if long else QUESTIONS[0]
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **DRAWN}
    with post(port, CHAT, json.dumps(body)) as response:
        response.read(100 if long else 600)  # the answer starts after about 200 bytes
        return response.status


def resident(pid: int) -> float:
    """Return a process's resident megabytes."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / 1000


def one(port: int, i: int, alone: dict[tuple[int, int], Answer]) -> str:
    """Send the i-th request; return its outcome in words."""
    if i % 4 == 3:
        return f"rude {rude(port, i // 4)}"
    at = i % len(KINDS), i // len(KINDS) % len(QUESTIONS)
    answer = answered(port, *at)
    return f"answer {answer.status}" if answer.same(alone[at]) else f"WRONG {answer.status}: {answer.text[:200]}"


@click.command()
@click.option("--requests", default=2000, show_default=True)
@click.option("--clients", default=32, show_default=True)
def main(requests: int, clients: int) -> None:
    """Send all requests, count outcomes, and fail if an answer is wrong or a status is a server error."""
    port, found, memory, tic = free_port(), Counter(), [], time.perf_counter()
    command = [sys.executable, "-m", "mlx_mtp", "serve", "--quiet", "--prompt-cache-size", "0.05"]
    with server(command, port) as (_, pid), ThreadPoolExecutor(clients) as pool:
        alone = {(k, q): answered(port, k, q) for k in range(len(KINDS)) for q in range(len(QUESTIONS))}
        for part in range(8):
            some = range(part * requests // 8, (part + 1) * requests // 8)
            found.update(pool.map(lambda i: one(port, i, alone), some))
            memory.append(resident(pid))
            print(f"{some.stop:6} requests   {memory[-1]:7.1f} MB   {dict(found)}", flush=True)
    print(json.dumps({"found": found, "resident_mb": memory, "seconds": round(time.perf_counter() - tic, 1)}))
    sys.exit(any(word.startswith("WRONG") or " 5" in word for word in found))


if __name__ == "__main__":
    main()
