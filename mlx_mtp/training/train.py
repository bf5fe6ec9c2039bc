"""Train a workshop's heads on a recording, keep the best by held-out acceptance, and continue after interruptions."""

import json
import math
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
from .optimize import STREAMS, Trainer, trapezoid
from .recording import Recording

MEASURES = 8  # during a training
SAVE_SECONDS = 60.0
NOISE = 0.1  # of the rows that the first head reads, against overfitting
STATE = "training.safetensors"


@dataclass(frozen=True)
class Plan:
    """How a training runs. steps: updates. rows, length: of a batch. rate: the peak learning rate.

    checkpoint: whether to use gradient checkpointing.
    """

    steps: int
    rows: int
    length: int
    rate: float
    seed: int
    checkpoint: bool = False


@dataclass(frozen=True)
class Best:
    """The parameters of the best heads so far, their acceptance, and the curve of (tokens seen, tokens per cycle)."""

    parameters: dict[str, Any]
    acceptance: Acceptance
    curve: list[tuple[int, float]]


def train(
    workshop: Workshop,
    recording: Recording,
    plan: Plan,
    folder: Path,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Best | None, bool]:
    """Train; return (the best heads by held-out tokens per cycle, whether all steps were done).

    The former is None if Ctrl-C came before the first measure.

    folder: where the state is saved each SAVE_SECONDS; a state of the same plan that is there is continued. Ctrl-C
    ends the training, with its state saved. ValueError if the loss is not finite.
    """
    kept = [d for d in recording.documents if not d.held]
    held = [d for d in recording.documents if d.held]
    options = {"model": workshop.model, "teacher": workshop.teacher, "ranks": workshop.ranks}
    options |= {"depths": workshop.depths, "checkpoint": plan.checkpoint, "noise": NOISE}
    trainer = Trainer(
        workshop.trained,
        partial(chain_loss, **options),
        first=0,
        steps=plan.steps,
        peak=plan.rate,
        streams=math.gcd(plan.rows, STREAMS),
        schedule=trapezoid,
    )
    state = _State(folder / STATE, plan, workshop, trainer)
    step, curve, best = state.load()
    if best is not None:
        best = Best(best, _with(workshop, best, recording, held), curve)
    every, saved = max(1, plan.steps // MEASURES), time.monotonic()
    try:
        for batch in _endless(recording, kept, plan, step):
            if step >= plan.steps:
                break
            report = trainer.step(step, *batch)
            step += 1
            if not mx.isfinite(report[1]).all().item():
                raise ValueError(f"the loss of step {step} is not finite; lower --learning-rate")
            if progress:
                progress(f"training, {report[0, 0].item():.0%} right", step, plan.steps)
            if step % every == 0 or step == plan.steps:
                found = measure(workshop.model, recording, held, workshop.depths)
                curve = [*curve, (step * plan.rows * plan.length, found.cycle.mean)]
                if best is None or found.cycle.mean > best.acceptance.cycle.mean:
                    best = Best(_copy(workshop), found, curve)
            if time.monotonic() - saved > SAVE_SECONDS:
                state.save(step, best, curve)
                saved = time.monotonic()
    except KeyboardInterrupt:
        state.save(step, best, curve)
    return best, step >= plan.steps


class _State:
    """The state of a training in a file: parameters, the optimizer's arrays, the best parameters and the curve."""

    def __init__(self, file: Path, plan: Plan, workshop: Workshop, trainer: Trainer):
        self.file, self.workshop, self.trainer = file, workshop, trainer
        self.plan = json.dumps([*vars(plan).values(), workshop.depths, sorted(workshop.formats)])

    def save(self, step: int, best: Best | None, curve: list[tuple[int, float]]) -> None:
        """Replace the file with the current state."""
        parts = {"now": _copy(self.workshop), "optimizer": dict(tree_flatten(self.trainer.optimizer.state))}
        parts["best"] = {} if best is None else best.parameters
        arrays = {f"{part}/{name}": w for part, found in parts.items() for name, w in found.items()}
        facts = {"plan": self.plan, "step": str(step), "curve": json.dumps(curve)}
        with whole_file(self.file) as work, work.open("wb") as f:
            mx.save_safetensors(f, arrays, metadata=facts)

    def load(self) -> tuple[int, list[tuple[int, float]], dict[str, Any] | None]:
        """Continue the state in the file; return (its step, curve, best parameters). Without one (0, [], None)."""
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
    """Return the trained parameters by path, as arrays that later updates do not change."""
    return dict(tree_flatten(workshop.trained.trainable_parameters()))


def put(workshop: Workshop, parameters: dict[str, Any]) -> None:
    """Replace the trained parameters by these, by path."""
    workshop.trained.update(tree_unflatten(list(parameters.items())))


def _with(workshop: Workshop, parameters: dict[str, Any], recording: Recording, held: list) -> Acceptance:
    """Return the acceptance with other parameters; the current ones are put back."""
    now = _copy(workshop)
    put(workshop, parameters)
    found = measure(workshop.model, recording, held, workshop.depths)
    put(workshop, now)
    return found


def _endless(recording: Recording, documents: list, plan: Plan, skip: int) -> Iterator[Batch]:
    """Yield the batches of all epochs from the one after the first `skip` on."""
    epoch = 0
    while True:
        for batch in batches(recording, documents, plan.rows, plan.length, plan.seed + epoch):
            if skip:
                skip -= 1
            else:
                yield batch
        epoch += 1
