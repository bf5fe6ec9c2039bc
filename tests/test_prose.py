"""Reject words that plain technical English replaces, in docstrings, comments, messages, pages and names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What to write, and regular expressions of what it replaces. They match whole words of lower-case text.
WORDS = {
    "sequence (decoding), conversation (chat), request or response (serve)": [
        "texts at once",
        "that is to be a text",
    ],
    "prefill, prefill chunk": ["reads? the prompt", "what is read of", "read of it"],
    "emit, yield or return": ["hand(s|ed|ing)? (out|over)", "gives? back"],
    "verify rows, accepted rows, rejected rows": ["rows that (are|were) (right|wrong|not shown)"],
    "release, free, evict or drop": ["lets? go", "letting go", "forg[eo]t\\w*"],
    "append, overwrite, copy or gather": ["takes? in", "taken in", "brings? home", "put in the order of"],
    "pending, queued, active, finished": ["on its way", "under way", "that are there", "is over"],
    "pause, resume, prefill the heads": ["parks?", "parked", "wakes?", "woken", "idle heads", "catch(es)? up"],
    "estimate, assume or measure": ["thinks?", "thought", "guess(es|ed)?", "(is|are) said"],
    "supported, refused": ["hears?", "heard", "comes? in"],
    "default, unless, at most, at least": [
        "as may",
        "so many",
        "so much",
        "as many as",
        "as much as",
        "at the (most|least)",
    ],
    "maximum, minimum": ["most (tokens|drafts|rows|gb)", "least (share|candidates)"],
    "reasoning content, tool call": ["calls of tools", "what came before"],
    "prefix cache, entry, checkpoint of a recurrent state": ["beginnings", "moments?"],
    "model, target, drafter": ["whose it is", "whoever", "somebody", "everybody", "nobody"],
    "the number of, the index of": ["how many", "which of", "that which"],
    "return, contain, store or state": ["tells?", "telling", "told", "say(s|ing)?", "said", "knows?", "knew"],
    "need, require or receive": [
        "wants?",
        "wanted",
        "learns?",
        "learnt",
        "(be|is|are) asked",
        "looks? at",
        "goes on",
    ],
    "again": ["anew"],
    "instead of, replace": ["in (the )?place of", "takes? the place of", "take their place", "in the stead"],
    "next to, compared with": ["beside"],
}
PATTERN = re.compile(rf"\b({'|'.join(p for patterns in WORDS.values() for p in patterns)})\b")

# Names that need a noun or a verb of the field instead.
NAMES = {"told", "tell", "said", "say", "there", "over", "behind", "beside", "whose", "talk", "door", "Together"}
# A name that is defined is followed by a sign, such as = or a comma; most of these words in prose are not.
ANY_NAME = re.compile(rf"\b({'|'.join(sorted(NAMES))})\s*([^\w\s.;!?'\"`]|in\b)")

# Uses that are right where they are: a public name, a quotation, another meaning of the word.
ALLOWED: dict[str, set[str]] = {
    "docs/serve.md": {"think"},  # a request field
    "docs/python.md": {"think"},  # the mark <think>
    "tests/grammar/test_gate.py": {"think"},  # the mark <think>
    "mlx_mtp/grammar/gate.py": {"think"},  # the mark <think>
    "mlx_mtp/grammar/constraint.py": {"behind"},  # a method of `Constraint`
    "tests/serve/test_answer.py": {"think"},  # the mark <think>
    "tests/serve/test_continued.py": {"think"},  # the mark <think>
    "tests/serve/test_frames.py": {"think"},  # the mark [THINK]
    "tests/serve/test_page.py": {"said"},  # a class in the page's HTML
    "tests/serve/test_tools.py": {"think"},  # the mark <think>
    "mlx_mtp/checkpoint/head_self_test.py": {"want"},  # a word of the self-test's text
    "mlx_mtp/decoding/drafters/drafter.py": {"behind"},  # a method of `Drafter`
    "bench/train_demo/card.py": {"how many", "knows", "learn", "says"},  # the released demo's model card
    "bench/train_seeing/card.py": {"how many"},  # a question of its training data
    "bench/train_seeing/scenes.py": {"how many"},  # as above
    "bench/train_demo/data.py": {"tell"},  # a question of its training data
}


def room_of(file: Path) -> str:
    """Return the folder below mlx_mtp/ or tests/ that holds a file, else its top folder or its name."""
    first, *rest = file.relative_to(ROOT).parts
    if first in ("mlx_mtp", "tests", "docs") and rest:
        return rest[0]
    return first


def rooms() -> dict[str, list[Path]]:
    """Return all files that are checked, by room."""
    found: dict[str, list[Path]] = {}
    for folder in ("mlx_mtp", "tests", "bench", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found.setdefault(room_of(file), []).append(file)
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("kernels/*.md")):
        found.setdefault(room_of(page), []).append(page)
    return found


ROOMS = rooms()


def prose(file: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page, or a program's comments, docstrings and other strings of several words."""
    if file.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        words = token.type == tokenize.STRING and " " in token.string
        if words or token.type in (tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None)):
            yield token.start[0], token.string


def names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the names that a program defines, each with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def findings(file: Path) -> list[str]:
    """Return "file:line: word" of each rejected word or name in a file."""
    path, text, found = str(file.relative_to(ROOT)), file.read_text(), []
    if PATTERN.search(text.lower()):  # as in one file of ten: only these are split into tokens
        found += [(line, match[0]) for line, piece in prose(file, text) for match in PATTERN.finditer(piece.lower())]
    if file.suffix == ".py" and ANY_NAME.search(text):
        found += [(line, name) for line, name in names(text) if name in NAMES]
    return [f"{path}:{line}: {word}" for line, word in found if word.lower() not in ALLOWED.get(path, ())]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_words_and_names_are_plain(room):
    assert [found for file in ROOMS[room] if file != Path(__file__) for found in findings(file)] == []


@pytest.mark.parametrize(
    "line",
    [
        '"""Tell which rows are right."""',
        "# A cycle that wants another row.",
        'raise ValueError(f"{n}: as many as may")',
        "told = 1",
        "def f(behind): ...",
        "self.there = 2",
    ],
)
def test_a_rejected_word_or_name_is_found(line, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(line)
    assert len(findings(tmp_path / "a.py")) == 1
