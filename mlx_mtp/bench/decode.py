"""Decoding speed: mlx-lm's loop, our plain loop, fixed numbers of drafts, adaptive, in turn on the same prompts.

A speed is tokens after the first over the time since the first; reading the prompt is timed apart. "adaptive" is what
a user gets who says nothing: it learns costs while it generates, and knows them from one prompt to the next.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_lm.generate import wired_limit

from ..machine.errors import first_line
from . import timing
from .loops import Loop, MlxLm, Ours, Reader, Run, Settings, twin
from .prompts import Prompt
from .result import result
from .subject import Subject

PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"
USUAL_DRAFTS = 3  # most fixed numbers of drafts that are tried where nothing is said
WARMUPS = 3  # on the first prompt of each setting

Progress = Callable[[int, int, str], None]


@dataclass
class Entry:
    """One loop on one prompt: a value per round in each list.

    context, kv_bits, mtp_kv_bits: 0 and None where they were left alone. read_seconds: the prompt's, but for its last
    token. text: a digest of the tokens; tokens: how many. seconds: since the first. drafted, accepted: per depth.
    Lists about cycles are empty for mlx-lm.
    """

    context: int
    kv_bits: int | None
    mtp_kv_bits: int | None
    category: str
    contender: str
    prompt_tokens: int
    read_seconds: float
    read_peak_bytes: int
    text: str
    tokens: list[int]
    seconds: list[float]
    peak_bytes: list[int]
    cycles: list[int]
    drafted: list[list[int]]
    accepted: list[list[int]]
    lookup_drafted: list[int]
    lookup_accepted: list[int]


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


def usual_drafts(subject: Subject) -> tuple[int, ...]:
    """The fixed numbers of drafts to try: up to one per rate that was given, else up to USUAL_DRAFTS."""
    most = min(subject.model.max_draft_tokens, max(USUAL_DRAFTS, len(subject.rates)))
    return tuple(range(1, most + 1))


def open_session(subject: Subject, drafts: Sequence[int], rounds: int, cooldown: float) -> Session:
    """A session of all loops that can run; ValueError for a number of drafts that the model cannot make."""
    loops, left_out = _loops(subject, drafts or usual_drafts(subject))
    return Session(subject, loops, rounds, cooldown, left_out=left_out)


def _loops(subject: Subject, drafts: Sequence[int]) -> tuple[list[Loop], dict[str, str]]:
    """mlx-lm, plain, one per number of drafts and adaptive; and what had to be left out, with the reason."""
    model, target = subject.model, subject.facts["target_bytes"]
    if too_many := [k for k in drafts if not 0 < k <= model.max_draft_tokens]:
        raise ValueError(f"drafts={too_many[0]}: allowed with this model is 1 to {model.max_draft_tokens}")
    loops: list[Loop] = []
    left_out = {}
    try:
        loops.append(MlxLm(twin(model), weights=target))
    except ValueError as e:
        left_out[MLX_LM] = str(e)
    loops.append(Ours(model, PLAIN, 0, {"prompt_lookup": False}, target))
    if model.mtp:
        both = target + subject.facts["head_bytes"]
        fixed = {"adaptive": False, "prompt_lookup": False}
        loops += [Ours(model, f"k={k}", k, fixed, both) for k in drafts]
        # Drafts that are looked up, too, but where acceptance is drawn.
        free = {"prompt_lookup": False} if subject.synthetic else {}
        loops.append(Ours(model, ADAPTIVE, None, free, both))
    return loops, left_out


def measure(session: Session, prompts: Sequence[Prompt], settings: Settings, progress: Progress) -> None:
    """Let all loops generate from each prompt in turn, and note times and texts in the session."""
    session.subject.forget()
    with session.subject.acceptance(), wired_limit(session.subject.model):
        for i, prompt in enumerate(prompts):
            progress(i, len(prompts), prompt.category)
            readers = _readers(session, prompt, settings)
            turns = {name: reader.run for name, reader in readers.items()}
            warmups = 0 if i else WARMUPS
            found = timing.interleaved(turns, session.rounds, warmups=warmups, cooldown=session.cooldown)
            for name, runs in found.items():
                session.entries.append(_entry(prompt, readers[name], runs))
            session.differences += _differences(session, prompt, settings, found)
    progress(len(prompts), len(prompts), "")


def _readers(session: Session, prompt: Prompt, settings: Settings) -> dict[str, Reader]:
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


def _entry(prompt: Prompt, reader: Reader, runs: Sequence[Run]) -> Entry:
    counted = [run.stats for run in runs if run.stats]
    return Entry(
        context=prompt.context,
        kv_bits=reader.settings.kv_bits,
        mtp_kv_bits=reader.settings.mtp_kv_bits,
        category=prompt.category,
        contender=reader.loop.name,
        prompt_tokens=len(prompt.tokens),
        read_seconds=reader.seconds,
        read_peak_bytes=reader.peak,
        text=hashlib.sha256(str(runs[0].tokens).encode()).hexdigest()[:12],
        tokens=[len(run.tokens) for run in runs],
        seconds=[run.seconds for run in runs],
        peak_bytes=[run.peak for run in runs],
        cycles=[stats.cycles for stats in counted],
        drafted=[stats.drafted for stats in counted],
        accepted=[stats.accepted for stats in counted],
        lookup_drafted=[stats.lookup_drafted for stats in counted],
        lookup_accepted=[stats.lookup_accepted for stats in counted],
    )


def _differences(session: Session, prompt: Prompt, settings: Settings, found: dict[str, list[Run]]) -> list[dict]:
    """Texts that are not our plain loop's, of the loops that promise it; where they part, and with which tokens."""
    text = found[PLAIN][0].tokens
    different = []
    for name, runs in found.items():
        drafting = name not in (PLAIN, MLX_LM)
        if (drafting and session.subject.rates) or (name == MLX_LM and settings.temp):
            continue
        other = next((run.tokens for run in runs if run.tokens != text), None)
        if other is not None:
            parted = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
            at = next(parted, min(len(text), len(other)))
            where = {"context": prompt.context, "kv_bits": settings.kv_bits, "mtp_kv_bits": settings.mtp_kv_bits}
            different.append(
                {**where, "category": prompt.category, "contender": name, "position": at}
                | {"expected": text[at : at + 1], "found": other[at : at + 1]}
            )
    return different


def as_result(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """The session as a result."""
    return result(
        "decode",
        session.subject.facts,
        {"rounds": session.rounds, "cooldown": session.cooldown, **options},
        entries=[asdict(entry) for entry in session.entries],
        differences=session.differences,
        left_out=session.left_out,
    )


def broken(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The differences that rounding does not explain: in float32, with caches that are not quantized."""
    exact = found["model"]["dtype"] == "float32"
    return [d for d in found["differences"] if exact and d["kv_bits"] is None]
