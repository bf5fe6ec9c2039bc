"""Texts with ambiguous repeats, and the tokens a pass of drafts that copy from them, without a model."""

import ast
import json
import random
import sysconfig
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grammars
import mlx.core as mx

from mlx_mtp.decoding.drafters.lookup import Lookup
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.decoding.run import Run
from mlx_mtp.tuning.plan import Plan


def records(seed: int) -> str:
    """Return a list of records in JSON: each key is followed by one of a few values in several places."""
    rng, values = (
        random.Random(seed),
        {
            "open": [True, False],
            "kind": ["function", "class", "module"],
            "by": ["Ada", "Grace", "Barbara", "Frances"],
            "passed": [True, False, None],
        },
    )
    each = [{key: rng.choice(some) for key, some in values.items()} for _ in range(150)]
    return "[" + ",\n".join(map(json.dumps, each)) + "]"


def calls(seed: int) -> str:
    """Return code whose lines begin alike and end in a few ways."""
    rng = random.Random(seed)
    names, words = ["name", "value", "index", "count"], ["True", "None", "0", "other"]
    line = "        self.{0} = {1} if self.{2} is None else self.{0}\n"
    body = (line.format(rng.choice(names), rng.choice(words), rng.choice(names)) for _ in range(200))
    return "".join(body)


def table(seed: int) -> str:
    """Return a table whose cells have few values."""
    rng, columns = random.Random(seed), (["open", "closed", "done"], ["low", "high"], ["yes", "no", "-"])
    return "".join(f"| {' | '.join(map(rng.choice, columns))} |\n" for _ in range(300))


def code(seed: int) -> str:
    """Return the text of instructions, of few kinds and registers."""
    rng, names = random.Random(seed), ["mov", "add", "sub", "mul"]
    return "".join(f"    {rng.choice(names)} r{rng.randrange(4)}, r{rng.randrange(4)}\n" for _ in range(300))


def values(seed: int) -> str:
    """Return a list of constants."""
    rng = random.Random(seed)
    return "".join(f"{rng.choice(['True', 'False', 'None'])}, " for _ in range(1500))


def tree_of(name: str) -> str:
    """Return the syntax tree of a module of the standard library."""
    return ast.dump(ast.parse(library(name)))


def library(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")


AMBIGUOUS = {"table": lambda: table(1), "code": lambda: code(1), "values": lambda: values(1)}
OTHERS = {"records": lambda: records(1), "calls": lambda: calls(1), "copy.py": lambda: tree_of("copy.py")}
FILES = {name: partial(library, name) for name in ("encodings/cp437.py", "locale.py", "mimetypes.py", "opcode.py")}


def decode(ids: list[int], start: int, k: int, *, tree: bool) -> tuple[int, int]:
    """Return (tokens, passes) of the cycles with copies, by a target that continues ids[:start] as `ids`.

    Cycles are planned and drafted as by the driver: before the host has read the tokens of the one before.
    """
    lookup, history = Lookup(k), TokenHistory(ids[: start - 1])
    tokens = passes = 0
    last = 0  # the last accepted row of the previous run
    base, rows = start - 2, [ids[start - 1]]  # position of its first row, and its tokens
    while base + last + k + 3 < len(ids):
        member = SimpleNamespace(history=history, base=base)
        history_end = base + 1
        plan = Plan("lookup", k, tree=tree) if matched(history, history_end) else Plan()
        accepted, new = 0, base + last + 1  # position of the newest token
        if plan.k:
            frame = SimpleNamespace(plan=plan, members=[member])
            run = Run(None, mx.array([rows]), mx.array([last]))
            accepted = right(lookup.propose(frame, run, k), ids[new + 1 :])
            tokens, passes = tokens + accepted + 1, passes + 1
        history.extend(ids[history_end : new + 1])
        size = 1 + plan.k if plan.k else 1
        rows = (ids[new + 1 : new + 2 + accepted] + [0] * size)[:size]
        base, last = new, accepted
    return tokens, passes


def matched(history: TokenHistory, size: int) -> bool:
    return bool(history.matches(size))


def right(drafts, text: list[int]) -> int:
    """Return the number of drafts on the longest path that continues as a text."""
    ids = drafts.tokens[0].tolist()
    parents = drafts.parents[0].tolist() if drafts.parents is not None else range(len(ids))
    depth = {0: 0}
    for row, (token, parent) in enumerate(zip(ids, parents, strict=True), 1):
        if parent in depth and text[depth[parent]] == token:
            depth[row] = depth[parent] + 1
    return max(depth.values())


def rates(text: str, rows: int, *, tokens: int = 1800) -> tuple[float, float]:
    """Return tokens a pass of chains and of trees with as many rows in the first `tokens` tokens of a text."""
    ids = grammars.demo_tokenizer().encode(text, add_special_tokens=False)[:tokens]
    chain, tree = (decode(ids, 600, rows - 1, tree=tree) for tree in (False, True))
    return chain[0] / chain[1], tree[0] / tree[1]
