"""Chat with a model; its caches hold the whole conversation.

    python examples/chat.py [MODEL]

MODEL is a directory or a hub name; the built-in demo without one. An empty line ends it, as Ctrl-D and Ctrl-C do.
"""

import contextlib
import sys

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.session import ChatSession

model, tokenizer = mlx_mtp.load(sys.argv[1] if len(sys.argv) > 1 else demo_path())

# A session keeps the messages, and reads only what is new of each prompt. Options are those of `stream_generate`.
session = ChatSession(model, tokenizer, system_prompt=None, max_tokens=200)

with contextlib.suppress(EOFError, KeyboardInterrupt):
    while message := input("> "):
        for response in session.ask(message):
            print(response.text, end="", flush=True)
        turn = session.turn
        print(f"\n({turn.prompt_tokens} prompt tokens, {turn.reused} of them already read)")
