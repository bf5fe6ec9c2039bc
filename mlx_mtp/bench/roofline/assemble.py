"""Assemble the result of `mlx-mtp bench model`: floors, predictions, measured times, documents, and errors."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.load import load_model
from ...demo import demo_path
from ...layers.port import Port
from ..random_model import shaped_model
from ..result import result
from .chips import CHIPS, Chip, find
from .documents import MODEL, documents
from .fitted import fitted_chips, read_fitted
from .floor import ROWS, floors
from .measured import nearest, times
from .ops import ModelOps
from .predict import kernels, predicted
from .released import MODELS
from .walk import of_port

Found = dict[str, Any]
DEMO = "demo"
ALIKE = 0.8  # of the other's bytes a model has to have to be the same; vectors are not counted here


@dataclass(frozen=True)
class FloorSubject:
    """A model whose floor is asked for, and where its operations come from."""

    name: str
    source: str
    model: ModelOps


def find_model(name: str | None = None, config: Path | None = None, *, on_chip: bool) -> FloorSubject:
    """Find a released model by its name, the demo, a checkpoint's directory, or a config.json; weights are not read.

    on_chip: unquantized weights and caches are counted in 16 bits, as a Mac keeps them; else as they are here.
    Raises ValueError, in one line, for anything else.
    """
    width = 2 if on_chip else None
    if config is not None:
        if name is not None:
            raise ValueError(f"config={config}: not together with a model; allowed is one of the two")
        shaped, _ = shaped_model(config)
        return FloorSubject(config.parent.resolve().name, config.name, of_port(shaped, width))
    name = MODEL if name is None else name
    if known := _known(name, MODELS):
        return FloorSubject(known, "released, 4 bits", MODELS[known])
    path = demo_path() if name == DEMO else Path(name).expanduser()
    if not path.is_dir():
        raise ValueError(f"model={name}: neither a directory nor known; allowed are {', '.join((*MODELS, DEMO))}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of heads that are missing: the floor then has no drafts
        found = load_model(path, lazy=True)
    if not isinstance(found, Port):
        raise ValueError(f"model={name}: a family without a port; allowed are released models and families with one")
    return FloorSubject(name, "checkpoint", of_port(found, width))


def find_chip(name: str | None) -> Chip | None:
    """Find a chip of CHIPS with its two fitted constants; ValueError for a name that is not there."""
    if name is None:
        return None
    known = _known(name.lower().removeprefix("apple "), CHIPS) or find(name.title())
    if known is None:
        raise ValueError(f"chip={name}: unknown; allowed are {', '.join(CHIPS)}")
    return fitted_chips()[known]


def bench_model(
    subject: FloorSubject, chip: Chip | None, context: int, rows: Iterable[int] = ROWS, results: Sequence[Found] = ()
) -> Found:
    """Make the result: floors in bytes, and with a chip seconds of these, predicted times and what kernels take off.

    results: of `bench decode`, `verify` or `profile` of the same model, whose times at about this context are set
    beside. ValueError where one is of another model, or at no such context.
    """
    rows, model, fitted = list(rows), subject.model, read_fitted()
    facts = {"name": subject.name, "source": subject.source, "heads": len(model.drafts)}
    facts |= {"max_draft_tokens": model.max_drafts, "target_bytes": model.total_bytes, "synthetic": None}
    on_chip = {}
    if chip is not None:
        fitted_to = fitted["chips"][chip.name]["fitted_to"]
        on_chip["chip"] = asdict(chip) | {"bandwidth": chip.bandwidth, "fitted_to": fitted_to}
        on_chip["predicted"] = predicted(model, chip, context, rows)
        on_chip["kernels"] = kernels(model, chip, context)
    return result(
        "model",
        facts,
        {"context": context, "rows": rows},
        floors=floors(model, context, rows),
        **on_chip,
        measured=[line for found in results for line in _times(found, subject, context)],
        documents=documents(fitted_chips()) if subject.name == MODEL else [],
        validation=fitted["validation"],
    )


def _times(found: Found, subject: FloorSubject, context: int) -> list[Found]:
    """Take a result's times at about this context, if it is of this model."""
    there, here = found["model"].get("target_bytes"), subject.model.total_bytes
    if there and not ALIKE < there / here < 1 / ALIKE:
        other = f"bench {found['bench']} of {found['model']['name']}, {there / 1e9:.3g} GB of weights"
        raise ValueError(f"measured: {other}; {subject.name} has {here / 1e9:.3g} GB: say --model or --config")
    return times(found, nearest(found, context))


def measured_model(found: Found) -> str | None:
    """Name the model that a result is of, if `find_model` knows it by that name."""
    return _known(found["model"]["name"], (*MODELS, DEMO))


def _known(name: str, names: Iterable[str]) -> str | None:
    return next((known for known in names if known.lower() == name.lower()), None)
