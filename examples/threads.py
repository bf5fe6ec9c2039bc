"""Serve several callers from asyncio: any thread may load a model, generate, and advance a generator.

    python examples/threads.py [MODEL]

The model works for one caller at a time, in turn, a cycle of a few tokens each; a text does not depend on the others.
"""

import asyncio
import sys

import mlx_mtp
from mlx_mtp.demo import demo_path

PROMPTS = ("def read_lines(path):", "class Stack:", "import os\n")


async def stream(model, tokenizer, prompt: str) -> str:
    """Collect a generation's pieces in worker threads, without blocking the event loop."""
    responses, pieces = mlx_mtp.stream_generate(model, tokenizer, prompt, max_tokens=8), []
    while (response := await asyncio.to_thread(next, responses, None)) is not None:
        pieces.append(response.text)
        print(f"{prompt[:12]!r}: {response.text!r}")
    return "".join(pieces)


async def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo_path()
    model, tokenizer = await asyncio.to_thread(mlx_mtp.load, path)
    texts = await asyncio.gather(*(stream(model, tokenizer, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"---\n{prompt}{text}")


asyncio.run(main())
