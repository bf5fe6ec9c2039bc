"""Answer questions with known answers, with and without drafts: equal texts, hence equal marks."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..layers.target import Target
from ..machine.errors import one_line
from .check import Progress, Verdict, with_progress
from .compare import Comparison, Reference, Way, compare
from .prompts import Prompt, chat

NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
BOX = "\\boxed{"


@dataclass(frozen=True)
class Task:
    question: str
    answer: str


@dataclass(frozen=True)
class Answered:
    """Whether the answers without drafts (`plain`, of `tokens` tokens) and with drafts are right, and equal."""

    task: Task
    plain: bool
    drafted: bool
    tokens: int
    same: bool


def read_tasks(file: str | Path) -> list[Task]:
    """Return the tasks in a JSON-lines file, {"question": ..., "answer": ...} a line; blank lines are skipped.

    ValueError for a wrong line, no tasks, or text that is not UTF-8; OSError if the file cannot be read.
    """
    try:
        lines = Path(file).read_text("utf-8").split("\n")  # JSON may contain other line separators
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not UTF-8 text") from None
    tasks = [_task(f"{file}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise ValueError(f"{file}: contains no tasks")
    return tasks


def _task(where: str, line: str) -> Task:
    with one_line(f"{where}: not JSON", (ValueError, RecursionError)):
        found = json.loads(line)
    question, answer = (found.get(name) if isinstance(found, dict) else None for name in ("question", "answer"))
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'{where}: expected {{"question": "...", "answer": "..."}}, with text in question')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"{where}: answer is {answer!r}, expected text that is not empty, or a number")
    return Task(question, str(answer).strip())


def is_right(text: str, answer: str) -> bool:
    """Return whether the last number in the last \\boxed{...} of a text, or else in the text, equals `answer`.

    An answer that is not a number must occur there as whole words, in any case and with any white space between them.
    """
    given = text if (box := _boxed(text)) is None else box
    if not NUMBER.fullmatch(answer):
        words = r"\s+".join(map(re.escape, answer.split()))
        return re.search(rf"(?<!\w){words}(?!\w)", given, re.IGNORECASE) is not None
    values = [Decimal(number.replace(",", "")) for number in (*NUMBER.findall(given)[-1:], answer)]
    return len(values) == 2 and values[0] == values[1]


def _boxed(text: str) -> str | None:
    """Return the contents of the last \\boxed{...}, whose braces may be nested; None without one or its end."""
    _, box, rest = text.rpartition(BOX)
    depth = 1
    for i, c in enumerate(rest if box else ""):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return rest[:i]
    return None


def answer_all(
    model: Target, tokenizer: Any, tasks: list[Task], way: Way, *, max_tokens: int, progress: Progress
) -> tuple[Verdict, list[Answered]]:
    """Return (a verdict that compares the outputs, one Answered per task, in the order of `tasks`).

    Every task is answered twice, greedily: without drafts, and drafted in `way`. The verdict has `greedy` only; its
    faults are not listed.
    """
    stops, comparison, answered = tuple(tokenizer.eos_token_ids), Comparison(way.name), []
    for i, task in enumerate(with_progress(tasks, "tasks", progress), 1):
        reference = Reference(model, Prompt(f"task {i}", chat(tokenizer, task.question)), max_tokens, stops)
        drafted = compare(reference, way, comparison)
        texts = ([t for t in text if t not in stops] for text in (reference.text, drafted))
        before, after = (is_right(tokenizer.decode(text), task.answer) for text in texts)
        answered.append(Answered(task, before, after, len(reference.text), drafted == reference.text))
    return Verdict(str(model.no_hidden().dtype).rpartition(".")[2], greedy=[comparison]), answered
