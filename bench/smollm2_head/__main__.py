"""Make the MTP head for SmolLM2-135M-Instruct that this package has: write answers, and train a head on them.

    python -m bench.smollm2_head --gguf FILE --tokenizer tokenizer.json --out DIR

The script needs PyTorch, NumPy, gguf and tokenizers, but not MLX. With 2,048 rows of 896 tokens the cache takes 42 GB
of memory. The files in DIR are head.npz (parameters in float16), vocab.npy (drafted tokens), tokens.npy (text of the
training), held.npz (conversations for the measurements) and report.json (the measurements). Each measurement writes
head.npz and report.json.

`python -m bench.smollm2_head.convert` converts the head to mtp.safetensors.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from .chain import Drafted, Head, Reading, record
from .markup import markup_of, pools
from .network import Sizes
from .target import Target, read_gguf
from .train import Budget, drafted_of, measure, most_frequent, train
from .write import HELD_OUT, TEST, TRAINING, Written, write

SEED = 7
HELD_ROWS, HELD_LENGTH, TEST_LENGTH = 480, 448, 320  # at most; a test question has a row of its own
BEGAN = time.monotonic()


def arguments(words: list[str]) -> argparse.Namespace:
    """Return the options on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.smollm2_head", description="Make SmolLM2's MTP head.")
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("--tokenizer", type=Path, required=True, help="its tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--write-seconds", type=float, default=170, help="time for the text; at least one episode")
    parser.add_argument("--train-seconds", type=float, default=200, help="time for the training")
    parser.add_argument("--episodes", type=int, help="number of episodes, instead of --write-seconds")
    parser.add_argument("--steps", type=int, help="number of training steps, instead of --train-seconds")
    parser.add_argument("--batch", type=int, default=2048, help="rows that an episode writes at once")
    parser.add_argument("--length", type=int, default=896, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=24, help="rows of a training step")
    return parser.parse_args(words)


def log(*facts: object) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:.0f}s]", *facts, flush=True)


def joined(parts: list[Written]) -> Written:
    """Return the rows of all parts."""
    return Written(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def text_of(target: Target, tokenizer: Tokenizer, given: argparse.Namespace) -> tuple[Written, Written, Written]:
    """Write and return the text for training, the held-out answers and the answers to the test questions."""
    markup = markup_of(tokenizer)
    prompts = pools(tokenizer, markup)
    log("prompts", *map(len, prompts))
    budget, parts = Budget(given.write_seconds, given.episodes), list[Written]()
    # Without a number of episodes, another one is written if it ends in time by the mean of those before.
    while not parts or budget.share() * (1 if given.episodes else 1 + 1 / len(parts)) < 1:
        parts.append(write(target, markup, prompts.training, TRAINING, given.batch, given.length))
        budget.done = len(parts)
        speed = budget.done * parts[0].tokens.numel() / budget.elapsed()
        log("episode", budget.done, f"{speed:.0f} tokens/s; in answers {parts[-1].answers.float().mean().item():.3f}")
    held_rows, held_length = min(given.batch, HELD_ROWS), min(given.length, HELD_LENGTH)
    held = write(target, markup, prompts.held_out, HELD_OUT, held_rows, held_length)
    test = write(target, markup, prompts.test, TEST, len(prompts.test), min(given.length, TEST_LENGTH))
    return joined(parts), held, test


class Report:
    """Measures a head in training, prints the result, and writes report.json and head.npz to the directory `out`.

    measured: readings of conversations by name. facts: further entries of report.json.
    """

    def __init__(self, out: Path, target: Target, drafted: Drafted, measured: dict[str, Reading], facts: dict):
        self.out, self.target, self.drafted, self.measured, self.facts = out, target, drafted, measured, facts
        self.curve: list[dict] = []

    def __call__(self, step: int, right: list[float], head: Head) -> None:
        found = {name: measure(self.target, head, self.drafted, text) for name, text in self.measured.items()}
        right = [round(share, 4) for share in right]
        self.curve.append({"step": step, "right in the text": right} | {k: v._asdict() for k, v in found.items()})
        (self.out / "report.json").write_text(json.dumps(self.facts | {"curve": self.curve}, indent=1))
        parameters: Any = {name: w.cpu().numpy().astype(np.float16) for name, w in head.items()}
        np.savez(self.out / "head.npz", **parameters)
        log("step", step, right, *(f"{name} {list(found[name])}" for name in found))


def main(words: list[str]) -> None:
    """Write the text, train the head and store the results."""
    given, device = arguments(words), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Target(read_gguf(given.gguf), Sizes(), given.length, dtype, device)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    log("loaded on", device)
    text, held, test = text_of(target, tokenizer, given)
    torch.cuda.empty_cache()
    vocabulary = most_frequent(target, text.tokens, markup_of(tokenizer).special)
    save(given.out, text, held, test, vocabulary)
    reading, measured = record(target, text), {"held out": record(target, held), "test": record(target, test)}
    log("read")
    drafted = drafted_of(target, vocabulary)
    covered = (drafted.ranks[text.tokens.flatten().long()] >= 0).float().mean().item()
    facts = {name: getattr(given, name) for name in ("batch", "length", "rows")}
    facts |= {"episodes": len(text.tokens) // given.batch, "share of drafted tokens": round(covered, 4)}
    facts |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__}
    log(facts)
    report = Report(given.out, target, drafted, measured, facts)
    budget = Budget(given.train_seconds, given.steps)
    head = train(target, drafted, reading, given.rows, budget, report)
    report(budget.done, [], head)
    log("done")


def save(out: Path, text: Written, held: Written, test: Written, vocabulary: torch.Tensor) -> None:
    """Write tokens.npy, held.npz and vocab.npy."""
    np.save(out / "tokens.npy", text.tokens.cpu().numpy().astype(np.uint16))
    np.save(out / "vocab.npy", vocabulary.cpu().numpy().astype(np.int32))
    both = (("held", held), ("test", test))
    arrays = {f"{name}_{k}": v.cpu().numpy() for name, rows in both for k, v in rows._asdict().items()}
    np.savez_compressed(out / "held.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1:])
