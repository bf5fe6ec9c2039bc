"""Assemble the result of `mlx-mtp bench model`: floors, predictions, measured times, errors."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.load import load_model
from ...demo import demo_path
from ...layers.port import Port
from ...machine.paths import expanded
from ..decode_tables import rows as loop_rows
from ..decode_tables import settings
from ..random_model import shaped_model
from ..result import result
from ..timing import measured as interval
from .chips import CHIPS, Chip, find, fitted_chips, read_fitted
from .links import over_links
from .models import MODELS, of_port
from .ops import ModelOps
from .phases import CYCLE, DRAFT, PLAIN, ROWS, VERIFY, floors, formats, kernels, lanes, predicted

Result = dict[str, Any]
Time = tuple[int, str, int, str, float]  # context, phase, rows M, side, seconds
MODEL, DEMO = "Step-3.5-Flash", "demo"
ALIKE = 0.8  # minimum ratio of bytes of two models that count as the same; vectors are not counted here
NEAR = 256  # tokens by which contexts may differ: prompts vary in length, and a profile does not store its own


@dataclass(frozen=True)
class FloorSubject:
    """A model's name and operations. source: what they were read from, for tables, such as "checkpoint"."""

    name: str
    source: str
    model: ModelOps


def find_model(name: str | None = None, config: Path | None = None, *, on_chip: bool) -> FloorSubject:
    """Return the operations of a released model (by default Step-3.5-Flash), the demo, a checkpoint or a config.json.

    name: one of MODELS, "demo", or a checkpoint's directory. Weights are not read.
    on_chip: of a checkpoint or config.json, count unquantized weights and caches in 16 bits, as on a Mac; otherwise
    in the type that they have on this machine. Raises a one-line ValueError for any other name, for name and config
    together, for a family without a port, and for a checkpoint or config.json that cannot be read.
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
    path = demo_path() if name == DEMO else expanded(name)
    if not path.is_dir():
        raise ValueError(
            f"model={name}: neither a directory nor a known model; allowed are {', '.join((*MODELS, DEMO))}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing heads: the floor then has no drafts
        found = load_model(path, lazy=True)
    if not isinstance(found, Port):
        raise ValueError(f"model={name}: a family without a port; allowed are released models and families with one")
    return FloorSubject(name, "checkpoint", of_port(found, width))


def find_chip(name: str | None) -> Chip | None:
    """Return a chip of CHIPS with its two fitted shares; None without a name, ValueError for an unknown one."""
    if name is None:
        return None
    plain = name.lower().removeprefix("apple ")
    sold = find(plain.title()) if re.fullmatch(r"m\d+( (pro|max|ultra))?", plain) else None  # not M3 for "M3 Ultr"
    known = _known(plain, CHIPS) or sold
    if known is None:
        raise ValueError(f"chip={name}: unknown; allowed are {', '.join(CHIPS)}")
    return fitted_chips()[known]


def measured_model(found: Result) -> str | None:
    """Return the name of a result's model as `find_model` accepts it: released or the demo; else None."""
    return _known(found["model"]["name"], (*MODELS, DEMO))


def _known(name: str, names: Iterable[str]) -> str | None:
    return next((known for known in names if known.lower() == name.lower()), None)


def bench_model(
    subject: FloorSubject,
    chip: Chip | None,
    context: int,
    rows: Iterable[int] = ROWS,
    results: Sequence[Result] = (),
    ranks: int = 1,
) -> Result:
    """Return the result of `bench model`: floors in bytes and, with a chip, predicted times and savings of kernels.

    results: of `bench decode`, `verify` or `profile` of the same model, whose times at a similar context are added.
    ValueError if they have no similar context (see `nearest`), or bytes of weights that are too different (ALIKE).
    ranks: number of ranks that share the model; above 1, the messages between them are added.
    """
    rows, model, fitted = list(rows), subject.model, read_fitted()
    facts = {"name": subject.name, "source": subject.source, "heads": len(model.drafts)}
    facts |= {"max_draft_tokens": model.max_drafts, "target_bytes": model.total_bytes, "synthetic": None}
    for other in results:
        their_bytes, our_bytes = other["model"].get("target_bytes"), model.total_bytes
        if their_bytes and not ALIKE < their_bytes / our_bytes < 1 / ALIKE:
            what = f"bench {other['bench']} of {other['model']['name']}, {their_bytes / 1e9:.3g} GB of weights"
            own = f"{subject.name} has {our_bytes / 1e9:.3g} GB"
            raise ValueError(f"measured: {what}, but {own}: give the measured model with --model or --config")
    found: Result = {"floors": floors(model, context, rows)}
    if chip is not None:
        fitted_to = fitted["chips"][chip.name]["fitted_to"]
        found["chip"] = asdict(chip) | {"bandwidth": chip.bandwidth, "fitted_to": fitted_to}
        found |= {"predicted": predicted(model, chip, context, rows), "kernels": kernels(model, chip, context)}
        found |= {"formats": formats(model, chip, context), "lanes": lanes(model, chip, context)}
    if ranks > 1:
        found["links"] = over_links(model, ranks, rows)
    found["measured"] = [line for other in results for line in nearest(other, context)]
    return result("model", facts, {"context": context, "rows": rows}, **found, validation=fitted["validation"])


def nearest(found: Result, context: int) -> list[Result]:
    """Return a result's times at its measured context nearest to `context`.

    Raises ValueError if the nearest one differs by more than NEAR (256) tokens and more than a tenth of `context`,
    and as `times`.
    """
    taken = times(found)
    known = list(dict.fromkeys(time["context"] for time in taken))
    near = min(known, key=lambda other: abs(other - context))
    if abs(near - context) > max(NEAR, context / 10):
        tokens = ", ".join(map(str, known))
        near = "give a context near one of these"
        raise ValueError(f"context={context}: bench {found['bench']} was measured at {tokens} tokens; {near}")
    return [time for time in taken if time["context"] == near]


def times(found: Result) -> list[Result]:
    """Return the times in a result of `bench decode`, `verify` or `profile`, one dict each.

    A dict has context (tokens), phase, rows M of the verify, drafts k, side, seconds.
    For short prompts the context is about the middle of a text. Raises ValueError for a result of another command, or
    without times.
    """
    taken = TAKEN.get(found["bench"])
    if taken is None:
        raise ValueError(f"measured: a result of bench {found['bench']}; allowed are {', '.join(TAKEN)}")
    names = "context", "phase", "rows", "side", "seconds"
    lines: list[Result] = [dict(zip(names, line, strict=True)) for line in taken(found)]
    if not lines:
        what = "no times of several tokens with unquantized caches; give one that has them"
        raise ValueError(f"measured: this result of bench {found['bench']} has {what}")
    return [line | {"drafts": line["rows"] - 1} for line in lines]


def _of_loops(found: Result) -> Iterator[Time]:
    """Yield seconds per plain step, ours and mlx-lm's, and per cycle of fixed numbers of drafts, host included.

    Only of settings with unquantized caches.
    """
    for setting in settings(found):
        entries = [e for e in found["entries"] if e["context"] == setting[0]]
        length = sum(e["prompt_tokens"] + sum(e["tokens"]) / len(e["tokens"]) / 2 for e in entries) / len(entries)
        context = setting[0] or round(length)
        for row in loop_rows(found, setting) if setting[1:] == (None, None) else ():
            if row.speed and row.contender in ("plain", "mlx-lm"):
                side = "loop" if row.contender == "plain" else "mlx-lm's loop"
                yield context, PLAIN, 1, side, 1 / row.speed.median
            elif row.speed and row.contender.startswith("k="):
                assert row.tokens_per_cycle
                yield context, CYCLE, int(row.contender[2:]) + 1, "loop", row.tokens_per_cycle / row.speed.median


def _of_passes(found: Result) -> Iterator[Time]:
    for curve in (curve for curve in found["curves"] if curve["name"] == "whole"):
        for side, seconds in curve["seconds"].items():
            for m, values in seconds.items():
                phase = PLAIN if int(m) == 1 else VERIFY
                yield curve["context"], phase, int(m), f"{side} pass", interval(values).median


def _of_phases(found: Result) -> Iterator[Time]:
    """Yield a profile's median seconds per cycle: draft, verify with its acceptance, all of these and the host's."""
    context = found["options"]["context"] or found["tokens"] // 2
    rows, cycles = found["options"]["k"] + 1, max(1, found["cycles"])
    parts: dict[str, Sequence[float]] = {name: s for name, s in found["seconds"].items() if name != "prefill"}
    verify = [a + b for a, b in zip(parts["verify"], parts["accept"], strict=True)]
    taken = {PLAIN if rows == 1 else VERIFY: verify, CYCLE: [sum(s) for s in zip(*parts.values(), strict=True)]}
    if rows > 1:
        taken = {DRAFT: parts["draft"], **taken}
    for phase, seconds in taken.items():
        yield context, phase, rows, "profile", interval(seconds).median / cycles


TAKEN = {"decode": _of_loops, "verify": _of_passes, "profile": _of_phases}
