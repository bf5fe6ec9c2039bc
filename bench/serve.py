"""Compare `mlx-mtp serve` with `mlx_lm.server` on the demo's weights: first token, speed, repeated prompts, chats.

    python bench/serve.py [--runs 5] [--max-tokens 250]

Both servers run all the time in their own processes; each measurement is made on one, then on the other. mlx_lm's
server gets a copy of the weights in float32, because mlx_lm has no bfloat16 experts on a CPU. For long answers both
get
copies with another stop token, because the demo's own answers are short.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import mlx.core as mx
from mlx_lm.utils import load_config, load_tokenizer, save_config

from mlx_mtp.demo import demo_path

PREFIX = 1500  # approximate tokens of the conversation's system prompt
UNENDING, AS_WRITTEN = 191, "Ā"  # byte 0 as the stop token
QUESTIONS = ("What does len do?", "What does sorted do?", "What does os.path.join do?", "What does zip do?")


@contextmanager
def server(command: list[str], port: int) -> Iterator[tuple[str, int]]:
    """Run a server; yield its address and its process."""
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health")
                break
            except OSError:
                time.sleep(0.1)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait()


def copied(path: Path, out: Path, *, float32: bool, unending: bool) -> Path:
    """Copy the demo with its weights in float32, or with another stop token."""
    shutil.copytree(path, out)
    if float32:
        weights = {name: array.astype(mx.float32) for name, array in mx.load(str(path / "model.safetensors")).items()}
        mx.save_safetensors(str(out / "model.safetensors"), weights)
    changes = {"torch_dtype": "float32"} if float32 else {}
    config = {**load_config(path), **changes}
    if unending:
        config["eos_token_id"] = [UNENDING]
        (out / "generation_config.json").unlink()
        tokenizer = json.loads((path / "tokenizer_config.json").read_text())
        (out / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": AS_WRITTEN}))
    save_config(config, out / "config.json")
    return out


def ask(address: str, question: str | list[dict], max_tokens: int) -> tuple[float, float, int, str]:
    """Stream one completion; return seconds to its first token, seconds after that, tokens, text."""
    path, field = ("completions", "prompt") if isinstance(question, str) else ("chat/completions", "messages")
    body = {field: question, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(f"{address}/v1/{path}", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    tic, first, text, tokens = time.perf_counter(), 0.0, "", 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            piece = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in chunk["choices"])
            first = first or (time.perf_counter() - tic if piece else 0.0)
            text += piece
    return first, time.perf_counter() - tic - first, tokens, text


def single(address: str, run: int, max_tokens: int) -> tuple[float, float]:
    """Return seconds to the first token and tokens per second for one client and one long answer."""
    kinds = json.loads(Path(__file__).with_name("prompts.json").read_text()).values()
    texts = [entries[0] for entries in kinds if isinstance(entries[0], str)]
    first, rest, tokens, _ = ask(address, texts[run % len(texts)], max_tokens)
    return first, (tokens - 1) / rest if rest else 0.0


def again(address: str, run: int) -> tuple[float, float]:
    """Return seconds to the first token and tokens per second for a prompt sent half a second earlier."""
    question = [{"role": "user", "content": f"Run {run}. {QUESTIONS[run % len(QUESTIONS)]}"}]
    ask(address, question, 30)
    time.sleep(0.5)
    first, rest, tokens, _ = ask(address, question, 30)
    return first, (tokens - 1) / rest if rest else 0.0


def conversation(address: str, run: int) -> tuple[float, float]:
    """Return median seconds to first tokens of turns 2 to 4 of four after a long system prompt, and the total."""
    question = "Be brief and correct. "
    system = f"Run {run}. " + question * (PREFIX // len(load_tokenizer(demo_path()).encode(question)))
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


def in_turn(
    measure: Callable[[str, int], tuple[float, float]], runs: int, *, unending: bool
) -> dict[str, list[tuple[float, float]]]:
    """Measure one server, then the other, run after run; the first run is a warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        places = [Path(directory) / name for name in ("ours", "mlx_lm")]
        paths = [copied(demo_path(), p, float32=p.name != "ours", unending=unending) for p in places]
        ours = [sys.executable, "-m", "mlx_mtp", "serve", "--quiet", "--alias", "*", "--model", str(paths[0])]
        theirs = [sys.executable, "-m", "mlx_lm", "server", "--model", str(paths[1])]
        with server(ours, free_port()) as (a, _), server(theirs, free_port()) as (b, _):
            found = {"ours": [], "mlx_lm": []}
            for run in range(runs + 1):
                for name, address in (("ours", a), ("mlx_lm", b)):
                    figures = measure(address, run)
                    if run:
                        found[name].append(figures)
    return found


@click.command()
@click.option("--runs", default=5, show_default=True)
@click.option("--max-tokens", default=250, show_default=True)
def main(runs: int, max_tokens: int) -> None:
    """Measure both servers in turn and print medians."""
    found = {"single": in_turn(lambda address, run: single(address, run, max_tokens), runs, unending=True)}
    found["again"] = in_turn(again, runs, unending=True)
    found["conversation"] = in_turn(conversation, runs, unending=False)
    report(found)


def report(found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    medians = {
        kind: {name: [statistics.median(values) for values in zip(*pairs, strict=True)] for name, pairs in of.items()}
        for kind, of in found.items()
    }
    speeds = ("first token s", "tokens/s")
    for kind, words in {"single": speeds, "again": speeds, "conversation": ("first token s", "seconds")}.items():
        for i, word in enumerate(words):
            ours, theirs = (medians[kind][name][i] for name in ("ours", "mlx_lm"))
            print(f"{kind:13} {word:14} ours {ours:8.3f}   mlx_lm {theirs:8.3f}   ratio {ours / theirs:.2f}")
    print(json.dumps({"medians": medians, "preload": os.environ.get("LD_PRELOAD", "")}))


if __name__ == "__main__":
    main()
