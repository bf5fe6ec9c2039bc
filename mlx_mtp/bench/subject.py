"""Open what is benchmarked: a checkpoint, or a model of a config.json's shape with random weights."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint.files import resolve
from ..checkpoint.load import load
from ..decoding.policy import Learned
from ..demo import demo_path
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .random_model import random_model
from .synthetic import check_rates, drawn_acceptance

DEMO = "demo"


class NothingRemembered:
    """Stands in for a model's remembered costs: what a benchmark learns, or knows, is the benchmark's alone."""

    def recall(self) -> None:
        return None

    def recall_compiled(self) -> None:
        return None

    def keep(self, *_: Any) -> None:
        pass


def forget(model: Any) -> None:
    """Let a model know nothing of what its cycles cost, and keep what it learns to itself."""
    model._learned = Learned(NothingRemembered(), NothingRemembered())  # type: ignore[arg-type] - as far as it is asked
    if hasattr(model, "_recorder"):
        del model._recorder


@dataclass
class Subject:
    """A model to measure.

    tokenizer: None where weights are random.
    facts:     for a result's "model"; `synthetic` of it says in words what is not the real thing, or None.
    rates:     drawn acceptance per depth; empty: what the heads guess counts.
    """

    model: Any
    tokenizer: Any
    name: str
    facts: dict[str, Any]
    rates: tuple[float, ...] = ()

    @property
    def synthetic(self) -> str | None:
        return self.facts["synthetic"]

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """What ends a text; nothing where it means nothing."""
        return () if self.synthetic else tuple(sorted(self.tokenizer.eos_token_ids))

    def acceptance(self) -> AbstractContextManager[None]:
        """Draw what is accepted inside, where rates were given; everything that drafts is to run there."""
        return drawn_acceptance(self.rates) if self.rates else nullcontext()

    def forget(self) -> None:
        """Let go of what cycles were learned to cost; the next adaptive generation begins from nothing."""
        forget(self.model)


def open_subject(
    model: str | Path | None = None,
    config: Path | None = None,
    *,
    layers: int | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mtp: bool = True,
    draft_model: str | None = None,
    kernels: str | None = None,
    synth_rates: Sequence[float] = (),
) -> Subject:
    """Load a checkpoint (a directory, a hub name, "demo" or None for the demo), or draw a model of a config.json.

    layers, bits, group_size: of the drawn model; see `random_model`. kernels, draft_model: as `load`'s.
    synth_rates: shares of drafts to keep, per depth; see `drawn_acceptance`.
    Raises ValueError, in one line, for what cannot be loaded or does not go together.
    """
    rates = check_rates(synth_rates) if synth_rates else ()
    if config is not None:
        if model is not None or draft_model is not None:
            raise ValueError(f"config={config}: not together with a checkpoint; allowed is one of the two")
        found = random_model(config, layers=layers, bits=bits, group_size=group_size, mtp=mtp)
        tokenizer, path = None, config
        on, not_exact = switch_on(found, requested(kernels))
        label = "random weights" if layers is None else f"random weights, the first {layers} layers only"
    else:
        if layers is not None:
            raise ValueError(f"layers={layers}: of random weights only; allowed with config alone")
        path = demo_path() if model in (None, DEMO) else resolve(model)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, tokenizer = load(path, mtp=mtp, draft_model=draft_model, kernels=kernels)
        on, not_exact, label = found.report.kernels, found.report.not_exact, None
    if rates and not found.mtp:
        raise ValueError(f"synth_rates={rates}: the model has no heads that draft; allowed is none")
    name = DEMO if path == demo_path() else path.parent.name if path.name == "config.json" else path.stem
    drawn = f"acceptance drawn at {', '.join(map(str, rates))}" if rates else None
    synthetic = "; ".join(filter(None, (label, drawn))) or None
    facts = {**_facts(name, found), "kernels": list(on), "not_exact": list(not_exact), "synthetic": synthetic}
    subject = Subject(found, tokenizer, name, facts, rates)
    subject.forget()
    return subject


def _facts(name: str, model: Any) -> dict[str, Any]:
    report = model.report
    return {
        "name": name,
        **{what: getattr(report, what) for what in ("family", "layers", "heads")},
        "max_draft_tokens": model.max_draft_tokens,
        **{what: getattr(report, what) for what in ("target_bytes", "head_bytes", "target_quantization")},
        "head_quantization": report.head_quantization if report.heads else None,
        "dtype": dtype_of(model),
    }


def dtype_of(model: nn.Module) -> str:
    """Find the widest type of the vectors, that is of the norms: what activations are computed in."""
    arrays: Any = tree_flatten(model.parameters())
    found = {a.dtype for _, a in arrays if a.ndim == 1 and mx.issubdtype(a.dtype, mx.floating)}
    widest = max(found, key=lambda dtype: dtype.size, default=mx.float32)
    return str(widest).rpartition(".")[2]
