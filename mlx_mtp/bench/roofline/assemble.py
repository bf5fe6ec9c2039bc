"""`mlx-mtp bench model` as one result: floors, predictions, measured times, the documents, and the model's errors."""

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
from .fit import fit, read_rows
from .floor import ROWS, floors
from .measured import nearest, times
from .ops import Model
from .predict import kernels, predicted
from .released import MODELS
from .validation import fitted_to, validation
from .walk import of_port

DEMO = "demo"
ALIKE = 0.8  # of the other's bytes a model has to have to be the same; vectors are not counted here


@dataclass(frozen=True)
class Subject:
    """A model whose floor is asked for, and where its operations come from."""

    name: str
    source: str
    model: Model


def find_model(name: str | None = None, config: Path | None = None, *, on_chip: bool) -> Subject:
    """A released model by its name, the demo, a checkpoint's directory, or a config.json; weights are not read.

    on_chip: unquantized weights and caches are counted in 16 bits, as a Mac keeps them; else as they are here.
    Raises ValueError, in one line, for anything else.
    """
    width = 2 if on_chip else None
    if config is not None:
        if name is not None:
            raise ValueError(f"config={config}: not together with a model; allowed is one of the two")
        shaped, _ = shaped_model(config)
        return Subject(config.parent.resolve().name, config.name, of_port(shaped, width))
    name = MODEL if name is None else name
    for known, model in MODELS.items():
        if name.lower() == known.lower():
            return Subject(known, "released, 4 bits", model)
    path = demo_path() if name == DEMO else Path(name).expanduser()
    if not path.is_dir():
        raise ValueError(f"model={name}: neither a directory nor known; allowed are {', '.join((*MODELS, DEMO))}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of heads that are missing: the floor then has no drafts
        found = load_model(path, lazy=True)
    if not isinstance(found, Port):
        raise ValueError(f"model={name}: a family without a port; allowed are released models and families with one")
    return Subject(name, "checkpoint", of_port(found, width))


def find_chip(name: str | None) -> Chip | None:
    """A chip of CHIPS with its two fitted constants; ValueError for a name that is not there."""
    if name is None:
        return None
    alike = {known.lower(): known for known in CHIPS}
    known = alike.get(name.lower().removeprefix("apple ")) or find(name.title())
    if known is not None:
        return fit(read_rows())[known]
    raise ValueError(f"chip={name}: unknown; allowed are {', '.join(CHIPS)}")


def bench_model(
    subject: Subject,
    chip: Chip | None,
    context: int,
    rows: Iterable[int] = ROWS,
    results: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The result: floors in bytes, and with a chip seconds of these, predicted times and what kernels take off.

    results: of `bench decode`, `verify` or `profile` of the same model, whose times at about this context are set
    beside. ValueError where one is of another model, or at no such context.
    """
    rows, model, published = list(rows), subject.model, read_rows()
    chips = fit(published)
    facts = {
        **{"name": subject.name, "source": subject.source, "heads": len(model.drafts)},
        **{"max_draft_tokens": model.max_drafts, "target_bytes": model.total_bytes, "synthetic": None},
    }
    on_chip = {}
    if chip is not None:
        on_chip = {
            "chip": asdict(chip) | {"bandwidth": chip.bandwidth, "fitted_to": fitted_to(chip.name, published)},
            "predicted": predicted(model, chip, context, rows),
            "kernels": kernels(model, chip, context),
        }
    times = [line for found in results for line in _times(found, subject, context)]
    return result(
        "model",
        facts,
        {"context": context, "rows": rows},
        floors=floors(model, context, rows),
        **on_chip,
        measured=times,
        documents=documents(chips) if subject.name == MODEL else [],
        validation=validation(published, chips),
    )


def _times(found: dict[str, Any], subject: Subject, context: int) -> list[dict[str, Any]]:
    there, here = found["model"].get("target_bytes"), subject.model.total_bytes
    if there and not ALIKE < there / here < 1 / ALIKE:
        other = f"bench {found['bench']} of {found['model']['name']}, {there / 1e9:.3g} GB of weights"
        raise ValueError(f"measured: {other}; {subject.name} has {here / 1e9:.3g} GB: say --model or --config")
    return times(found, nearest(found, context))


def measured_model(found: dict[str, Any]) -> str | None:
    """The model that a result is of, if `find_model` knows it by that name."""
    name = found["model"]["name"].lower()
    return next((known for known in (*MODELS, DEMO) if known.lower() == name), None)
