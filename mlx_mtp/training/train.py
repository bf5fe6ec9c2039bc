"""Train the heads of a `Workshop` on a recording, and continue an interrupted training from a file."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..machine.atomic import file as whole_file
from ..machine.errors import one_line
from .batches import Batch, batches
from .heads import Workshop
from .loss import chain_loss
from .measure import Acceptance, measure
from .optimize import Trainer
from .recording import Recording

MEASURES = 8  # least number of measurements of the held-out acceptance in a training
SAVE_SECONDS = 60.0
NOISE = 0.1  # of the rows that the first head reads, against overfitting
STATE = "training.safetensors"


@dataclass(frozen=True)
class TrainingPlan:
    """How a training runs. steps: number of updates. rows, length: B and L of `Batch`. rate: the peak learning rate.

    seed: of the order of documents and rows, and of noise. checkpoint: as in `chain`.
    """

    steps: int
    rows: int
    length: int
    rate: float
    seed: int
    checkpoint: bool = False


@dataclass(frozen=True)
class Best:
    """The heads with the most held-out tokens per cycle so far: their trained parameters by path, and acceptance.

    curve: (tokens trained on, held-out tokens per cycle) of the measurements up to then; after a continued run, up to
    the file's state or later.
    """

    parameters: dict[str, Any]
    acceptance: Acceptance
    curve: list[tuple[int, float]]


def train(
    workshop: Workshop,
    recording: Recording,
    plan: TrainingPlan,
    folder: Path,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Best | None, bool]:
    """Train the heads of `workshop`; return (the best of those measured, whether the training was not interrupted).

    They are measured at least MEASURES times, or after each of fewer steps; the best is None if Ctrl-C arrived
    before the first measurement. Ctrl-C ends the training. folder: directory of the file STATE, which is written
    about every SAVE_SECONDS seconds and at Ctrl-C; the training continues from the file if it exists.
    progress: called after each step with a text, the number of steps done, and that of all. ValueError if the loss is
    not finite, and for a STATE that is damaged, or of another plan or other heads.
    """
    kept = [d for d in recording.documents if not d.held]
    held = [d for d in recording.documents if d.held]
    options = {"model": workshop.model, "teacher": workshop.teacher, "ranks": workshop.ranks}
    options |= {"depths": workshop.depths, "checkpoint": plan.checkpoint, "noise": NOISE}
    trainer = Trainer(workshop.trained, partial(chain_loss, **options), steps=plan.steps, peak=plan.rate)
    state = _State(folder / STATE, plan, workshop, trainer)
    step, curve, best = state.load()
    if best is not None:
        best = Best(best, _with(workshop, best, recording, held), curve)
    saved, measured = time.monotonic(), partial(_measured, workshop, recording, held, plan)
    try:
        best, curve = measured(step, best, curve)  # if Ctrl-C came between a step and its measurement
        for batch in _endless(recording, kept, plan, step):
            if step >= plan.steps:
                break
            report = trainer.step(step, *batch)
            step += 1
            if not mx.isfinite(report[1]).all().item():
                raise ValueError(f"the loss of step {step} is not finite; lower --learning-rate")
            if progress:
                progress(f"training, {report[0, 0].item():.0%} right", step, plan.steps)
            best, curve = measured(step, best, curve)
            if time.monotonic() - saved > SAVE_SECONDS:
                state.save(step, best, curve)
                saved = time.monotonic()
    except KeyboardInterrupt:
        step = max(step, trainer.done)  # a step can end before it is counted
        state.save(step, best, curve)
        return best, False
    return best, True


def _measured(
    workshop: Workshop,
    recording: Recording,
    held: list,
    plan: TrainingPlan,
    step: int,
    best: Best | None,
    curve: list,
) -> tuple[Best | None, list[tuple[int, float]]]:
    """Return `best` and the curve after `step` steps: with a measurement if one is due and not in the curve yet."""
    trained = step * plan.rows * plan.length
    due = step and (step % max(1, plan.steps // MEASURES) == 0 or step == plan.steps)
    if not due or (curve and curve[-1][0] == trained):
        return best, curve
    found = measure(workshop.model, recording, held, workshop.depths)
    curve = [*curve, (trained, found.cycle.mean)]
    if best is None or found.cycle.mean > best.acceptance.cycle.mean:
        best = Best(_copy(workshop), found, curve)
    return best, curve


class _State:
    """Saves and loads a training's state in a file: parameters, the optimizer's arrays, the best ones, the curve."""

    def __init__(self, file: Path, plan: TrainingPlan, workshop: Workshop, trainer: Trainer):
        self.file, self.workshop, self.trainer = file, workshop, trainer
        self.plan = json.dumps([*vars(plan).values(), workshop.depths, sorted(workshop.formats)])

    def save(self, step: int, best: Best | None, curve: list[tuple[int, float]]) -> None:
        """Replace the file with the workshop's and optimizer's current state, and these values. step: steps done."""
        parts = {"now": _copy(self.workshop), "optimizer": dict(tree_flatten(self.trainer.optimizer.state))}
        parts["best"] = {} if best is None else best.parameters
        arrays = {f"{part}/{name}": w for part, found in parts.items() for name, w in found.items()}
        facts = {"plan": self.plan, "step": str(step), "curve": json.dumps(curve)}
        with whole_file(self.file) as work, work.open("wb") as f:
            mx.save_safetensors(f, arrays, metadata=facts)

    def load(self) -> tuple[int, list[tuple[int, float]], dict[str, Any] | None]:
        """Set the workshop's parameters and the optimizer to the file's; return (steps done, curve, best parameters).

        The last is None if nothing had been measured. Without a file (0, [], None). ValueError for a damaged file, or
        one of another plan or other heads.
        """
        if not self.file.exists():
            return 0, [], None
        with one_line(f"{self.file}: damaged; delete it", (RuntimeError, KeyError, ValueError)):
            loaded: Any = mx.load(str(self.file), return_metadata=True)
            arrays, facts = loaded
            step, curve = int(facts["step"]), [tuple(pair) for pair in json.loads(facts["curve"])]
        if facts["plan"] != self.plan:
            raise ValueError(f"{self.file}: of a training with other options; delete it, or give the same options")
        parts: dict[str, dict[str, Any]] = {}
        for name, w in arrays.items():
            part, _, inside = name.partition("/")
            parts.setdefault(part, {})[inside] = w
        put(self.workshop, parts["now"])
        self.trainer.optimizer.state = tree_unflatten(list(parts["optimizer"].items()))
        return step, curve, parts.get("best")


def _copy(workshop: Workshop) -> dict[str, Any]:
    """Return the trainable parameters by path; later updates replace these arrays and do not change them."""
    return dict(tree_flatten(workshop.trained.trainable_parameters()))


def put(workshop: Workshop, parameters: dict[str, Any]) -> None:
    """Replace the parameters of `workshop.trained` at the paths in `parameters`."""
    workshop.trained.update(tree_unflatten(list(parameters.items())))


def _with(workshop: Workshop, parameters: dict[str, Any], recording: Recording, held: list) -> Acceptance:
    """Return the acceptance on the documents `held` with these parameters; the current ones are put back."""
    now = _copy(workshop)
    put(workshop, parameters)
    found = measure(workshop.model, recording, held, workshop.depths)
    put(workshop, now)
    return found


def _endless(recording: Recording, documents: list, plan: TrainingPlan, skip: int) -> Iterator[Batch]:
    """Yield batches of one epoch after another, without end, except the first `skip` batches."""
    epoch = 0
    while True:
        for batch in batches(recording, documents, plan.rows, plan.length, plan.seed + epoch):
            if skip:
                skip -= 1
            else:
                yield batch
        epoch += 1
