"""Tune a model's MTP heads, or make new ones, on the model's own choices, and write them as a sidecar."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.draft_vocab import digest, most_frequent
from ..checkpoint.tuned import fingerprint, write_heads
from ..layers.port import Port
from . import heads as making
from .estimate import Estimate, estimate, fit
from .measure import Acceptance, measure
from .reading import pieces, record
from .recording import Recording
from .settings import DTYPES, FEWEST, Settings
from .texts import Given, Text, answered, given_texts, own_texts
from .train import Plan, put, train

LENGTH = 256  # positions of a training row
DOCUMENT = 512  # maximum tokens of a document
WORK = ".work"  # the suffix of the folder with the recording and the training's state, next to the sidecar
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning. file: the sidecar; None if nothing got better, and nothing was written.

    before, after: acceptance on held-out text; before is None for new heads. curve: (tokens seen, tokens per cycle).
    """

    file: Path | None
    before: Acceptance | None
    after: Acceptance | None
    curve: tuple[tuple[int, float], ...]

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        found = []
        for name, acceptance in (("before", self.before), ("after", self.after)):
            if acceptance is not None:
                depths = ", ".join(map(str, acceptance.depths))
                found.append(f"{name}: drafts right by depth {depths}; tokens per cycle {acceptance.cycle}")
        if self.after is None:
            return [*found, "Stopped before the first measurement: nothing written."]
        positions = f"Measured at {self.after.positions:,} held-out positions, with 95% intervals."
        end = f"Written: {self.file}" if self.file else "The heads did not get better: nothing written."
        return [*found, positions, end]


def tune_heads(
    model: Any,
    tokenizer: Any,
    texts: Iterable[Given] | None = None,
    *,
    out: str | Path = "mtp.safetensors",
    settings: Settings | None = None,
    confirm: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Tuned:
    """Train a model's MTP heads on its own choices; write them to `out` if held-out acceptance rises.

    The model does not change: at the end it has the heads that it had before. Load it with `kernels="off"`. `out` is
    for `load(mtp_path=out)`. Ctrl-C keeps the best heads so far. An interrupted run is continued by the same call;
    its recording and state are in a folder next to `out`, which a complete run deletes.

    texts: texts, token ids, messages, and paths of files, which the model reads; messages that end with the user's
    and prompts in *.jsonl files are answered by the model first. None: the model writes prompts and answers itself.
    confirm: called with the estimate before the time is spent. progress: called with a stage, the number done and the
    total. options: fields of Settings. ValueError, one line, for options, texts or a model that do not fit.
    """
    settings = settings or Settings(**options)
    settings.check()
    _check_model(model, new=settings.new)
    file = Path(out).expanduser().resolve()
    if file.suffix != ".safetensors":
        raise ValueError(f"out={out}: allowed are names *.safetensors")
    folder = file.with_name(file.name + WORK)
    mx.random.seed(settings.seed)
    about = {"model": fingerprint(model), "adapter": model.runtime.adapters.fingerprint or ""}
    about |= {"tokenizer": digest(tokenizer), "tokens": settings.tokens, "seed": settings.seed}
    recording = Recording(folder / "recording", about, model.no_hidden().shape[-1])
    recording.check_room(settings.tokens)
    skipped = 0 if texts is None else len(recording.documents)
    given = islice(
        pieces(_texts(model, tokenizer, texts, settings, recording), DOCUMENT, model.vocab_size), skipped, None
    )
    work, before = _Work(model, tokenizer, settings, recording, file, folder, progress), (model.mtp, model.spec)
    try:
        _record(work, given, FEWEST)
        workshop = _workshop(work)
        rows, checkpoint = fit(workshop, settings.rows, LENGTH)
        if confirm:
            seen = int(settings.epochs * settings.tokens)
            costs = {"checkpoint": checkpoint, "write": texts is None}
            confirm(estimate(workshop, max(0, settings.tokens - recording.size), seen, rows, LENGTH, **costs))
        workshop.restore()
        _record(work, given, settings.tokens)
        workshop = _workshop(work)
        tuned, complete = _train(work, workshop, rows, checkpoint=checkpoint)
    finally:
        model.mtp, model.spec = before
    if complete:
        shutil.rmtree(folder, ignore_errors=True)
    return tuned


@dataclass(frozen=True)
class _Work:
    """What the steps of one tuning share."""

    model: Any
    tokenizer: Any
    settings: Settings
    recording: Recording
    file: Path
    folder: Path
    progress: Progress | None


def _check_model(model: Any, *, new: bool) -> None:
    """Raise ValueError for a model whose heads cannot be trained here."""
    if not isinstance(model, Port):
        raise ValueError("the model's family has no port that drafts; no heads can be trained for it")
    if model.runtime.trials is not None:
        raise ValueError('the model has kernels without gradients; load it with kernels="off"')
    if model.ranks:
        raise ValueError("the model is split over ranks; load it on one machine")
    if model.drafter is not None or not isinstance(model.spec.capture, str):
        raise ValueError("the model drafts with an external drafter; load it without draft_model")
    if getattr(model.runtime.report, "drafted_from", None):
        raise ValueError("the heads have a reduced draft vocabulary; load the model without draft_vocab")
    if not (new or model.mtp):
        raise ValueError("the model has no MTP heads to tune; --new makes some")


def _texts(
    model: Any, tokenizer: Any, texts: Iterable[Given] | None, settings: Settings, recording: Recording
) -> Iterator[Text]:
    """Yield the given texts from the first on, or the model's own, which differ from those recorded before."""
    if texts is None:
        yield from own_texts(model, tokenizer, DOCUMENT, settings.seed + len(recording.documents))
        return
    yield from answered(given_texts(texts, tokenizer), model, tokenizer, DOCUMENT)


def _record(work: _Work, documents: Iterator[tuple[Text, bool]], tokens: int) -> None:
    """Record documents up to `tokens` tokens, and on until some are held out; hold out the last if the texts end.

    ValueError if there are fewer than FEWEST tokens, or only one document.
    """
    recording, before = work.recording, -1
    record(work.model, documents, recording, tokens, work.progress)
    while not _both(recording) and recording.size > before:
        before = recording.size
        record(work.model, documents, recording, before + 1, work.progress)
    if recording.size < FEWEST or len(recording.documents) < 2:
        found = f"{recording.size} tokens in {len(recording.documents)} documents"
        raise ValueError(f"too little text: {found}; give at least {FEWEST} tokens in at least 2")
    if not _both(recording):
        recording.turn_last()


def _both(recording: Recording) -> bool:
    return len({document.held for document in recording.documents}) == 2


def _workshop(work: _Work) -> making.Workshop:
    """Return the workshop for the settings, with the draft vocabulary of the recorded choices for a new head."""
    settings, model, dtype = work.settings, work.model, DTYPES[work.settings.dtype]
    if not settings.new:
        return making.existing(model, dtype, settings.rank)
    hidden, pairs = work.recording.arrays()
    vocab, size = None, settings.draft_vocab
    if size is not None and size < model.vocab_size:
        counts = Counter(pairs[:, 1].tolist())
        vocab = most_frequent(work.tokenizer, counts, size, model.vocab_size)
    workshop = making.new(model, vocab, settings.depths, settings.bits, dtype)
    making.set_scale(workshop, mx.array(hidden[:FEWEST]))
    return workshop


def _train(work: _Work, workshop: making.Workshop, rows: int, *, checkpoint: bool) -> tuple[Tuned, bool]:
    """Train, measure the finished heads, write them if they are better; return also whether all steps were done."""
    settings, recording, model = work.settings, work.recording, work.model
    held = [document for document in recording.documents if document.held]
    before = None
    if not settings.new:
        model.mtp = workshop.before[0]
        before = measure(model, recording, held, workshop.depths)
        model.mtp = workshop.trained.mtp
    steps = max(1, round(settings.epochs * recording.size / (rows * LENGTH)))
    rate = settings.rate or (1e-3 if settings.new else 2e-4)
    plan = Plan(steps, rows, LENGTH, rate, settings.seed, checkpoint)
    best, complete = train(workshop, recording, plan, work.folder, work.progress)
    if best is None:
        return Tuned(None, before, None, ()), False
    put(workshop, best.parameters)
    model.mtp = workshop.finished()
    after = measure(model, recording, held, workshop.depths)
    better = after.cycle.mean > (1.0 if before is None else before.cycle.mean)
    if better:
        write_heads(model, work.file, {"mlx_mtp_tuned": json.dumps({"seed": settings.seed, "steps": steps})})
    return Tuned(work.file if better else None, before, after, tuple(best.curve)), complete
