"""The training data: docstrings as chats and source code, and what of them is held out."""

import hashlib
import random
from dataclasses import dataclass

from .library import FAMOUS_NAMES, Doc, code_pieces, known_docs, source_docs, source_files, with_summaries

HELD_OUT_MODULES = {"calendar", "shlex", "sched", "graphlib", "fractions", "zipapp", "cmd", "colorsys"}
QUESTIONS = (
    "What does {} do?",
    "Explain {}.",
    "How do I use {}?",
    "What is {}?",
    "Describe {}.",
    "Tell me about {}.",
    "What does {} do in Python?",
    "Can you explain {}?",
    "What is {} for?",
    "{}",
)
SYSTEM_PROMPT = "You are a helpful assistant."


@dataclass(frozen=True)
class Phase:
    """Data of one phase: docstrings known by heart so many times, one in so many of the other docstrings and of
    the code (or, if `functions_only`, of its short top-level functions); if `self_written`, also what the trunk
    itself writes. It lasts `share` parts of the steps; `rate` multiplies the schedule's learning rate."""

    share: int
    famous: int
    known: int
    others_one_in: int
    code_one_in: int
    functions_only: bool = False
    self_written: bool = False
    rate: float = 1.0


PHASES = (
    Phase(share=12, famous=16, known=2, others_one_in=2, code_one_in=6),
    Phase(share=5, famous=6, known=1, others_one_in=4, code_one_in=2),
    Phase(share=7, famous=6, known=1, others_one_in=4, code_one_in=1, functions_only=True, rate=1.5),
    Phase(
        share=6, famous=6, known=1, others_one_in=4, code_one_in=1, functions_only=True, self_written=True, rate=4.0
    ),
)
LONGEST_FUNCTION = 1200


def held_out(text: str, *, one_in: int = 40) -> bool:
    """A fixed slice of all texts, by content, so that copies of a docstring fall on the same side."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % one_in == 0


def load_corpus() -> dict[str, list]:
    """{"docs", "code"} to train on, {"held_docs", "held_code"} to evaluate on: Docs, and source text."""
    docs = {doc.name: doc for doc in known_docs()}
    files = source_files()
    held_names = set()
    for module, source in files:
        found = {doc.name: doc for doc in source_docs(module, source) if doc.text}
        docs = found | docs
        held_names |= set(found) if module in HELD_OUT_MODULES else set()
    famous = {docs[name].text for name in FAMOUS_NAMES & set(docs)}
    held_names |= {name for name, doc in docs.items() if held_out(doc.text) and doc.text not in famous}
    held_texts = {docs[name].text for name in held_names}
    corpus = {
        "docs": [docs[name] for name in sorted(docs) if docs[name].text not in held_texts],
        "held_docs": [docs[name] for name in sorted(held_names)],
        "code": [],
        "held_code": [],
    }
    for module, source in files:
        if module in HELD_OUT_MODULES:
            corpus["held_code"] += code_pieces(with_summaries(source, set()))
        else:
            corpus["code"] += code_pieces(with_summaries(source, held_texts))
    return corpus


def chat(doc: Doc, rng: random.Random) -> list[dict]:
    """A question about the name, often the plain "What does X do?", and its docstring as the answer."""
    question = QUESTIONS[0] if rng.random() < 0.4 else rng.choice(QUESTIONS)
    return [
        {"role": "user", "content": question.format(doc.name)},
        {"role": "assistant", "content": doc.text},
    ]


def epoch(corpus: dict[str, list], rng: random.Random, phase: Phase) -> list[str | list[dict]]:
    """One shuffled pass of the phase: chats (some of two turns, some with a system prompt) and source code."""
    times = {"famous": phase.famous, "known": phase.known, "other": 0}
    known = [doc for doc in corpus["docs"] for _ in range(times[doc.fame])]
    others = [doc for doc in corpus["docs"] if doc.fame == "other"]
    turns = [chat(doc, rng) for doc in [*known, *rng.sample(others, len(others) // phase.others_one_in)]]
    rng.shuffle(turns)
    chats = []
    while turns:
        messages = turns.pop()
        if turns and rng.random() < 0.2:
            messages = messages + turns.pop()
        if rng.random() < 0.2:
            messages = [{"role": "system", "content": SYSTEM_PROMPT}, *messages]
        chats.append(messages)
    code = corpus["code"]
    if phase.functions_only:
        code = [piece for piece in code if piece.startswith("def ") and len(piece) < LONGEST_FUNCTION]
    documents = [*chats, *rng.sample(code, len(code) // phase.code_one_in)]
    rng.shuffle(documents)
    return documents
