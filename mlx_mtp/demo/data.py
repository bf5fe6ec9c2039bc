"""The training data: docstrings as chats and source code, and what of them is held out."""

import hashlib
import random

from .library import FAMOUS_NAMES, Doc, code_pieces, known_docs, source_docs, source_files, without_docstrings

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
            corpus["held_code"] += code_pieces(source)
        else:
            corpus["code"] += code_pieces(without_docstrings(source, held_texts))
    return corpus


def chat(doc: Doc, rng: random.Random) -> list[dict]:
    """A question about the name, often the plain "What does X do?", and its docstring as the answer."""
    question = QUESTIONS[0] if rng.random() < 0.4 else rng.choice(QUESTIONS)
    return [
        {"role": "user", "content": question.format(doc.name)},
        {"role": "assistant", "content": doc.text},
    ]


def epoch(corpus: dict[str, list], rng: random.Random) -> list[str | list[dict]]:
    """One shuffled pass: chats (some of two turns, some with a system prompt) about what is known by heart and
    half of the rest, and a sixth of the code."""
    known = [doc for doc in corpus["docs"] for _ in range(doc.weight) if doc.weight > 1]
    others = [doc for doc in corpus["docs"] if doc.weight == 1]
    turns = [chat(doc, rng) for doc in [*known, *rng.sample(others, len(others) // 2)]]
    rng.shuffle(turns)
    chats = []
    while turns:
        messages = turns.pop()
        if turns and rng.random() < 0.2:
            messages = messages + turns.pop()
        if rng.random() < 0.2:
            messages = [{"role": "system", "content": SYSTEM_PROMPT}, *messages]
        chats.append(messages)
    documents = [*chats, *rng.sample(corpus["code"], len(corpus["code"]) // 6)]
    rng.shuffle(documents)
    return documents
