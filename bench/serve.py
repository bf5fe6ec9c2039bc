"""Compare `mlx-mtp serve` with `mlx_lm.server` on the demo's weights: time to first token, speed, a conversation.

    python bench/serve.py [--runs 5] [--max-tokens 250]

Both servers run all the time, in processes of their own; each measurement is taken of one, then of the other. That of
mlx_lm gets a copy of the weights in float32, as it has no bfloat16 experts on a CPU.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import mlx.core as mx
from mlx_lm.utils import load_config, save_config

from mlx_mtp.demo import demo_path

PREFIX = 1500  # tokens of the conversation's system prompt, about
QUESTIONS = ("What does len do?", "What does sorted do?", "What does os.path.join do?", "What does zip do?")


@contextmanager
def server(command: list[str], port: int) -> Iterator[str]:
    """Run a server; yields its address."""
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health")
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def in_float32(path: Path, out: Path) -> Path:
    """Write the demo's target, without heads, in float32."""
    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(path / "model.safetensors")).items()}
    mx.save_safetensors(str(out / "model.safetensors"), weights)
    save_config({**load_config(path), "torch_dtype": "float32"}, out / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (out / name).write_bytes((path / name).read_bytes())
    return out


def ask(address: str, messages: list[dict], max_tokens: int) -> tuple[float, float, int, str]:
    """Stream one answer: seconds to its first token, seconds after that, tokens, text."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    tic, first, text, tokens = time.perf_counter(), 0.0, "", 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            piece = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            first = first or (time.perf_counter() - tic if piece else 0.0)
            text += piece
    return first, time.perf_counter() - tic - first, tokens, text


def single(address: str, run: int, max_tokens: int) -> tuple[float, float]:
    """One client, one long answer: seconds to the first token, tokens per second."""
    said = f"Write class number {run} of a module that reads files, with all of its methods."
    first, rest, tokens, _ = ask(address, [{"role": "user", "content": said}], max_tokens)
    return first, (tokens - 1) / rest if rest else 0.0


def conversation(address: str, run: int) -> tuple[float, float]:
    """Four turns behind a long system prompt: median seconds to first tokens of turns 2 to 4, seconds of all."""
    system = f"Run {run}. " + "Be brief and correct. " * (PREFIX // 6)
    messages, firsts, tic = [{"role": "system", "content": system}], [], time.perf_counter()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        first, _, _, text = ask(address, messages, 40)
        messages.append({"role": "assistant", "content": text})
        firsts.append(first)
    return statistics.median(firsts[1:]), time.perf_counter() - tic


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@click.command()
@click.option("--runs", default=5, show_default=True)
@click.option("--max-tokens", default=250, show_default=True)
def main(runs: int, max_tokens: int) -> None:
    """Measure both servers in turn and print medians."""
    with tempfile.TemporaryDirectory() as directory:
        theirs = [sys.executable, "-m", "mlx_lm", "server", "--model", str(in_float32(demo_path(), Path(directory)))]
        ours = [sys.executable, "-m", "mlx_mtp", "serve", "--quiet", "--alias", "*"]
        with server(ours, free_port()) as a, server(theirs, free_port()) as b:
            found = {name: {"ours": [], "mlx_lm": []} for name in ("single", "conversation")}
            for run in range(runs + 1):  # the first one warms up
                for name, address in (("ours", a), ("mlx_lm", b)):
                    one, talk = single(address, run, max_tokens), conversation(address, run)
                    if run:
                        found["single"][name].append(one)
                        found["conversation"][name].append(talk)
    report(found)


def report(found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    medians = {
        kind: {name: [statistics.median(values) for values in zip(*pairs, strict=True)] for name, pairs in of.items()}
        for kind, of in found.items()
    }
    for kind, words in (("single", ("first token s", "tokens/s")), ("conversation", ("first token s", "seconds"))):
        for i, word in enumerate(words):
            ours, theirs = (medians[kind][name][i] for name in ("ours", "mlx_lm"))
            print(f"{kind:13} {word:14} ours {ours:8.3f}   mlx_lm {theirs:8.3f}   ratio {ours / theirs:.2f}")
    print(json.dumps({"medians": medians, "preload": os.environ.get("LD_PRELOAD", "")}))


if __name__ == "__main__":
    main()
