"""Train a model's MTP heads, or new ones, to draft the model's most likely tokens, and write them to a file."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.draft_vocab import digest, most_frequent
from ..checkpoint.tuned import fingerprint, write_heads
from ..machine.errors import one_line
from ..machine.paths import expanded
from . import heads as making
from .estimate import Estimate, estimate, fit
from .measure import Acceptance, measure
from .reading import HELD_OUT, pieces, record, skip_recorded
from .recording import Recording
from .settings import DTYPES, FEWEST, TuneSettings
from .texts import Given, Text, answered, given_texts, own_texts
from .train import Best, TrainingPlan, put, train

LENGTH = 256  # positions of a training row
DOCUMENT = 512  # maximum tokens of a document
MORE = 4 * HELD_OUT  # documents recorded at most so that some are held out and some are not
WORK = ".work"  # the suffix of the folder with the recording and the training's state, next to the sidecar
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning. file: the heads' file, None if nothing was written.

    before, after: acceptance on held-out text of the model's own heads (None with a new one), and of the trained ones
    in their final formats (None if Ctrl-C arrived before the first measurement). curve: (tokens trained on, held-out
    tokens per cycle) of the measurements, at least up to the best one.
    """

    file: Path | None
    before: Acceptance | None
    after: Acceptance | None
    curve: tuple[tuple[int, float], ...]

    def lines(self) -> list[str]:
        """Return the result as lines of text for the terminal."""
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
    settings: TuneSettings | None = None,
    confirm: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Tuned:
    """Train a model's MTP heads to draft the model's most likely tokens; write them to `out` if they get better.

    Better are more held-out tokens per cycle than with the heads before, or, for a new head, more than 1. The model
    does not change: at the end it has the heads that it had before. Load it with `kernels="off"`. `out` is a
    *.safetensors file for `load(mtp_path=out)`. Ctrl-C during the training ends it with the best heads so far.
    The same call continues an interrupted run, whose recording and state are in a folder named like `out` with
    ".work" appended; a complete run deletes it, and so does an error before 2,000 tokens are recorded.

    texts: strings, lists of token ids, lists of messages, and `Path`s of files (see `read_file`). Prompts without an
    answer, as messages that end with the user's, are answered by the model first. None: the model writes prompts and
    answers itself. confirm: called with the estimate when 2,000 tokens are recorded; its exceptions end the call.
    progress: called with a stage, the number done and the total. options: fields of Settings, unless `settings` is
    given, which then counts alone. MLX's random state is seeded. ValueError, one line, for values, texts or a model
    that are not allowed.
    """
    settings = settings or TuneSettings(**options)
    settings.check()
    _check_model(model, new=settings.new)
    file = _file(out)
    mx.random.seed(settings.seed)
    folder = file.with_name(file.name + WORK)
    recording = _recording(model, tokenizer, settings, folder, own=texts is None)
    given = pieces(_texts(model, tokenizer, texts, settings, recording), DOCUMENT, model.vocab_size)
    work, before = _Work(model, tokenizer, settings, recording, file, folder, progress), (model.mtp, model.spec)
    if texts is not None:
        skip_recorded(given, recording)
    try:
        recording.check_room(settings.tokens)
        _workshop(work).restore()  # refuses a model or settings before anything is recorded
        _record(work, given, FEWEST)
        workshop = _workshop(work)
        rows, checkpoint = fit(workshop, settings.rows, LENGTH)
        if confirm:
            missing, seen = max(0, settings.tokens - recording.size), int(settings.epochs * settings.tokens)
            how = {"checkpoint": checkpoint, "write": texts is None}
            confirm(estimate(workshop, missing, seen, rows, LENGTH, **how))
        workshop.restore()
        _record(work, given, settings.tokens)
        workshop = _workshop(work)
        tuned, complete = _train(work, workshop, rows, checkpoint=checkpoint)
    except (ValueError, OSError):
        if recording.size < FEWEST:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        model.mtp, model.spec = before
    if complete:
        shutil.rmtree(folder, ignore_errors=True)
    return tuned


def _file(out: str | Path) -> Path:
    """Return the absolute path of `out`; ValueError if its name does not end with ".safetensors"."""
    file = expanded(out).resolve()
    if file.suffix != ".safetensors":
        raise ValueError(f"out={out}: allowed are names *.safetensors")
    return file


def _recording(model: Any, tokenizer: Any, settings: TuneSettings, folder: Path, *, own: bool) -> Recording:
    """Return the recording in a work folder, created if it is missing. own: the model writes the texts.

    ValueError for a recording of another model or tokenizer, of other settings, or with the other `own`.
    """
    about = {"model": fingerprint(model), "adapter": model.runtime.adapters.fingerprint or ""}
    about |= {"tokenizer": digest(tokenizer), "tokens": settings.tokens, "seed": settings.seed}
    about["source of the texts"] = "the model" if own else "the user"
    return Recording(folder / "recording", about, model.no_hidden().shape[-1])


@dataclass(frozen=True)
class _Work:
    """The arguments that the steps of one `tune_heads` call share; folder: that of the recording and state."""

    model: Any
    tokenizer: Any
    settings: TuneSettings
    recording: Recording
    file: Path
    folder: Path
    progress: Progress | None


def _check_model(model: Any, *, new: bool) -> None:
    """Raise ValueError for a model whose heads cannot be trained. new: a new head is made, so it needs none."""
    if not getattr(model, "cached_layers", list)():
        raise ValueError("the model's layers have no streams that could be read; no heads can be trained for it")
    if model.runtime.trials is not None:
        raise ValueError('the model has kernels without gradients; load it with kernels="off"')
    if model.ranks:
        raise ValueError("the model is split over ranks; load it on one machine")
    if model.drafter is not None or not isinstance(model.spec.capture, str):
        raise ValueError("the model drafts with an external drafter; load it without draft_model")
    if getattr(model.runtime.report, "drafted_from", None):
        raise ValueError("the heads have a reduced draft vocabulary; load the model without draft_vocab")
    if not (new or model.mtp):
        raise ValueError("the model has no MTP heads to tune; --new makes some (Python: new=True)")


def _texts(
    model: Any, tokenizer: Any, texts: Iterable[Given] | None, settings: TuneSettings, recording: Recording
) -> Iterator[Text]:
    """Yield the given texts, with the model's answers to prompts among them, as in `answered`.

    If `texts` is None, yield prompts and answers of the model instead, as in `own_texts`, whose seed is that of the
    settings plus the number of recorded documents.
    """
    if texts is None:
        yield from own_texts(model, tokenizer, DOCUMENT, settings.seed + len(recording.documents))
        return
    yield from answered(given_texts(texts, tokenizer), model, tokenizer, DOCUMENT)


def _record(work: _Work, documents: Iterator[tuple[Text, bool]], tokens: int) -> None:
    """Record documents until there are `tokens` tokens, and some documents are held out and some are not.

    So that both are there, at most MORE further documents are recorded; if then, or where the documents end before,
    all are held out or none is, the last of them are held out: one in HELD_OUT, at least one. ValueError if there are
    fewer than FEWEST tokens, or only one document.
    """
    recording = work.recording
    record(work.model, documents, recording, tokens, work.progress)
    for _ in range(MORE):
        if _both(recording):
            break
        record(work.model, documents, recording, recording.size + 1, work.progress)
    count = len(recording.documents)
    if recording.size < FEWEST or count < 2:
        found = f"{recording.size} tokens in {count} documents"
        raise ValueError(f"too little text: {found}; give at least {FEWEST} tokens in at least 2 documents")
    if not _both(recording):
        recording.hold_last(max(1, count // HELD_OUT))


def _both(recording: Recording) -> bool:
    return len({document.held for document in recording.documents}) == 2


def _workshop(work: _Work) -> making.Workshop:
    """Return a new `Workshop` for the settings, which puts the heads to train into the model.

    A new head drafts settings.draft_vocab tokens: those fixed by `most_frequent`, and those that the target chose
    most often in the recording; all tokens if the tokenizer has no more. ValueError if `draft_vocab` is less than the
    number of those fixed.
    """
    settings, model, dtype = work.settings, work.model, DTYPES[work.settings.dtype]
    if not settings.new:
        return making.existing(model, dtype, settings.rank)
    recorded = work.recording.arrays() if work.recording.documents else None
    vocab, size = None, settings.draft_vocab
    if size is not None and size < sum(token < model.vocab_size for token in {*work.tokenizer.get_vocab().values()}):
        counts = Counter[int](recorded[1][:, 1].tolist() if recorded else ())
        with one_line(f"draft_vocab={size}: too few", (ValueError,)):
            vocab = most_frequent(work.tokenizer, counts, size, model.vocab_size)
    workshop = making.new(model, vocab, settings.depths, settings.bits, dtype)
    if recorded:
        making.set_scale(workshop, mx.array(recorded[0][:FEWEST]))
    return workshop


def _train(work: _Work, workshop: making.Workshop, rows: int, *, checkpoint: bool) -> tuple[Tuned, bool]:
    """Measure the model's own heads, if it has any, and train; return (the result, whether all steps were done).

    rows: of a batch. checkpoint: as in `chain`.
    """
    settings, model = work.settings, work.model
    before = None
    if not settings.new:
        model.mtp = workshop.before[0]
        before = _measured(work, workshop)
        model.mtp = workshop.trained.mtp
    steps = max(1, round(settings.epochs * work.recording.size / (rows * LENGTH)))
    rate = settings.peak_rate(model.width)
    plan = TrainingPlan(steps, rows, LENGTH, rate, settings.seed, checkpoint)
    best, complete = train(workshop, work.recording, plan, work.folder, work.progress)
    if best is None:
        return Tuned(None, before, None, ()), complete
    return _finish(work, workshop, before, best, steps), complete


def _finish(work: _Work, workshop: making.Workshop, before: Acceptance | None, best: Best, steps: int) -> Tuned:
    """Measure the best heads in their final formats, write them if they are better than before, return the result."""
    settings, model = work.settings, work.model
    put(workshop, best.parameters)
    model.mtp = workshop.finished()
    after = _measured(work, workshop)
    better = after.cycle.mean > (1.0 if before is None else before.cycle.mean)
    if better:
        write_heads(model, work.file, {"mlx_mtp_tuned": json.dumps({"seed": settings.seed, "steps": steps})})
    return Tuned(work.file if better else None, before, after, tuple(best.curve))


def _measured(work: _Work, workshop: making.Workshop) -> Acceptance:
    """Return the acceptance of the heads in the model on the held-out documents."""
    held = [document for document in work.recording.documents if document.held]
    return measure(work.model, work.recording, held, workshop.depths)
