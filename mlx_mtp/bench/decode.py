"""Time mlx-lm's loop, our plain loop, fixed numbers of drafts, and adaptive drafting, in turn on the same prompts.

A speed is tokens after the first over the time since the first; reading the prompt is timed apart. "adaptive" is what
a user gets who says nothing: it learns costs while it generates, and knows them from one prompt to the next.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from mlx_lm.generate import wired_limit

from ..machine.errors import first_line
from . import timing
from .loops import Loop, LoopSettings, MlxLm, Ours, Reader, TimedRun, twin
from .prompts import BenchPrompt
from .result import result
from .subject import Subject

PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"
USUAL_DRAFTS = 3  # most fixed numbers of drafts that are tried where nothing is said
WARMUPS = 3  # on the first prompt of each setting

Progress = Callable[[str, int, int], None]  # what comes next, how much is done, and of how much


class Entry:
    """One loop on one prompt: a value per round in each list.

    context, kv_bits, mtp_kv_bits: 0 and None where they were left alone. read_seconds: the prompt's, but for its last
    token. text: a digest of the tokens; tokens: how many. seconds: since the first. drafted, accepted: per depth.
    Lists about cycles are empty for mlx-lm.
    """

    def __init__(self, prompt: BenchPrompt, reader: Reader, runs: Sequence[TimedRun]):
        counted = [run.stats for run in runs if run.stats]
        self.context = prompt.context
        self.kv_bits, self.mtp_kv_bits = reader.settings.kv_bits, reader.settings.mtp_kv_bits
        self.category, self.contender = prompt.category, reader.loop.name
        self.prompt_tokens = len(prompt.tokens)
        self.read_seconds, self.read_peak_bytes = reader.seconds, reader.peak
        self.text = hashlib.sha256(str(runs[0].tokens).encode()).hexdigest()[:12]
        self.tokens = [len(run.tokens) for run in runs]
        self.seconds, self.peak_bytes = [run.seconds for run in runs], [run.peak for run in runs]
        self.cycles = [stats.cycles for stats in counted]
        self.drafted, self.accepted = [stats.drafted for stats in counted], [stats.accepted for stats in counted]
        self.lookup_drafted = [stats.lookup_drafted for stats in counted]
        self.lookup_accepted = [stats.lookup_accepted for stats in counted]


@dataclass
class Session:
    """A benchmark under way: what was measured so far, and what was found wrong.

    differences: where a text is not that of our plain loop. left_out: loops that cannot run, and why.
    """

    subject: Subject
    loops: list[Loop]
    rounds: int
    cooldown: float = 0.0
    entries: list[Entry] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def open_session(subject: Subject, drafts: Sequence[int], rounds: int, cooldown: float) -> Session:
    """Begin a session of all loops that can run: mlx-lm, plain, one per number of drafts, and adaptive.

    drafts: where none are given, up to one per drawn rate, or USUAL_DRAFTS.
    Raises ValueError for a number of drafts that the model cannot make.
    """
    model, target, most = subject.model, subject.facts["target_bytes"], subject.model.max_draft_tokens
    drafts = drafts or range(1, min(most, max(USUAL_DRAFTS, len(subject.rates))) + 1)
    if too_many := [k for k in drafts if not 0 < k <= most]:
        raise ValueError(f"drafts={too_many[0]}: allowed with this model is 1 to {most}")
    session = Session(subject, [], rounds, cooldown)
    try:
        session.loops.append(MlxLm(twin(model), weights=target))
    except ValueError as e:
        session.left_out[MLX_LM] = str(e)
    heads_alone = {"prompt_lookup": False}
    session.loops.append(Ours(model, PLAIN, 0, heads_alone, target))
    if model.mtp:
        both, fixed = target + subject.facts["head_bytes"], {"adaptive": False, **heads_alone}
        session.loops += [Ours(model, f"k={k}", k, fixed, both) for k in drafts]
        # Drafts that are looked up, too, but where acceptance is drawn.
        session.loops.append(Ours(model, ADAPTIVE, None, heads_alone if subject.synthetic else {}, both))
    return session


def measure(session: Session, prompts: Sequence[BenchPrompt], settings: LoopSettings, progress: Progress) -> None:
    """Let all loops generate from each prompt in turn, and note times and texts in the session."""
    session.subject.forget()
    with session.subject.acceptance(), wired_limit(session.subject.model):
        for i, prompt in enumerate(prompts):
            progress(prompt.category, i, len(prompts))
            readers = _readers(session, prompt, settings)
            turns = {name: reader.run for name, reader in readers.items()}
            warmups = 0 if i else WARMUPS
            found = timing.interleaved(turns, session.rounds, warmups=warmups, cooldown=session.cooldown)
            session.entries += [Entry(prompt, readers[name], runs) for name, runs in found.items()]
            session.differences += _differences(session, prompt, settings, found)
    progress("", len(prompts), len(prompts))


def _readers(session: Session, prompt: BenchPrompt, settings: LoopSettings) -> dict[str, Reader]:
    """Every loop that can, with the prompt read."""
    readers = {}
    for loop in session.loops:
        try:
            readers[loop.name] = Reader(loop, prompt.tokens, settings).read()
        except Exception as e:  # mlx-lm's own, of any kind
            if not isinstance(loop, MlxLm):
                raise
            what = f" with kv_bits={settings.kv_bits}" if settings.kv_bits else ""
            session.left_out[f"{loop.name}{what}"] = first_line(e)
    return readers


def _differences(
    session: Session, prompt: BenchPrompt, settings: LoopSettings, found: dict[str, list[TimedRun]]
) -> list[dict[str, Any]]:
    """Texts that are not our plain loop's, of the loops that promise it; where they part, and with which tokens."""
    where = {"context": prompt.context, "kv_bits": settings.kv_bits, "mtp_kv_bits": settings.mtp_kv_bits}
    text, different = found[PLAIN][0].tokens, []
    for name, runs in found.items():
        others = settings.temp if name == MLX_LM else session.subject.rates and name != PLAIN
        other = next((run.tokens for run in runs if run.tokens != text and not others), None)
        if other is not None:
            at = next(i for i, (a, b) in enumerate(zip_longest(text, other)) if a != b)
            parted = {"category": prompt.category, "contender": name, "position": at}
            different.append({**where, **parted, "expected": text[at : at + 1], "found": other[at : at + 1]})
    return different


def as_result(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """Make a result of the session."""
    return result(
        "decode",
        session.subject.facts,
        {"rounds": session.rounds, "cooldown": session.cooldown, **options},
        entries=[dict(vars(entry)) for entry in session.entries],
        differences=session.differences,
        left_out=session.left_out,
    )


def broken(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Pick the differences that rounding does not explain: in float32, with caches that are not quantized."""
    exact = found["model"]["dtype"] == "float32"
    return [d for d in found["differences"] if exact and d["kv_bits"] is None]
