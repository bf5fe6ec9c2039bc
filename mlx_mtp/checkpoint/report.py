"""Report a load: the model, its MTP heads and how they are stored."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..decoding.graph_memory import nbytes
from .files import DECLARED

USUAL_AGREEMENT = 0.4  # most trained heads reach more
ADVICE = "mlx-mtp verify-lossless tests whether it is wired or converted wrongly"
LISTED = 8  # names of tensors in a line
DRAFTING = ("mtp", "drafter")  # the parts of a model that draft
COLUMNS = 100  # of a line that can be wrapped
AgreementRates = tuple[tuple[str, float], ...]  # share of tokens by kind of text


@dataclass(frozen=True)
class Report:
    """The facts of one load; `str(report)` is the output of `--report`.

    heads: depths loaded; declared: heads in config.json; source: where the heads are, or why there are none.
    agreement: by kind of text, the share of the target's tokens that the first head drafts; empty if not tested.
    adapter: name of the adapter that the load selected, with which `agreement` was tested; "" for none.
    adapters: names of the adapters that can be selected, each with its `agreement`.
    untested: the heads' weights are read, checked and tested before the first draft.
    drafted_from: number of LM-head rows with a draft vocabulary, and without; None if there is no draft vocabulary.
    saved_bytes: bytes of heads that the draft vocabulary saves; negative if rows of a shared LM head were copied.
    ranks: number of ranks that share the target; target_bytes are one rank's.
    kernels: a line for each Metal kernel in use; not_exact: ops whose bits may depend on the number of rows.
    rows: the findings of `check_rows` in words, "" without any.
    prefill_chunk: tokens per prefill chunk; None on a CPU.
    drafter: description of an external drafter, else ""; head_bytes and head_quantization then include it.
    port: "written" in `models/`, "made" of mlx-lm's model and what it supports, or "none" and why it has no drafts.
    vision: the vision tower in words, or why there is none; "" for a family that reads no pictures.
    heads_source: where MTP heads that draft next to the drafter are, else ""; head_bytes counts both.
    """

    family: str
    layers: int
    target_bytes: int
    target_quantization: str
    heads: int
    declared: int | None
    head_bytes: int
    head_quantization: str
    source: str
    norms: str
    lm_head: str
    ignored: tuple[str, ...] = ()
    expanded: bool = False
    agreement: AgreementRates = ()
    adapter: str = ""
    adapters: tuple[tuple[str, AgreementRates], ...] = ()
    untested: bool = False
    drafted_from: tuple[int, int] | None = None
    saved_bytes: int = 0
    ranks: int = 1
    kernels: tuple[str, ...] = ()
    not_exact: tuple[str, ...] = ()
    rows: str = ""
    prefill_chunk: int | None = None
    drafter: str = ""
    heads_source: str = ""
    port: str = "written"
    vision: str = ""

    def __str__(self) -> str:
        found = self.heads if self.declared in (None, self.heads) else f"{self.heads} of {self.declared} declared"
        shares, adapted = _shares(self.agreement), f" with adapter {self.adapter}" * bool(self.adapter)
        parts = f"{size(self.head_bytes)}, {self.head_quantization}"
        left, before = self.drafted_from or (0, 0)
        whole, exact = ", by its whole LM head" * bool(before), ", ".join(self.not_exact)
        few = f"; few: {ADVICE}" if self.agreement and self.agreement[-1][1] < USUAL_AGREEMENT else ""
        change = "less" if self.saved_bytes >= 0 else "more for a copy of their rows"
        drafts = self.heads or self.drafter
        wrap = textwrap.TextWrapper(COLUMNS - 11, subsequent_indent="    ", break_on_hyphens=False).wrap
        lines = [line for kernel in self.kernels for line in wrap(kernel)]
        return table(
            ("family", f"{self.family}, {self.layers} layers"),
            ("port", self.port),
            ("target", self.target_bytes and f"{size(self.target_bytes)}, {self.target_quantization}"),
            ("drafter", self.drafter and f"{self.drafter}, {self.source}"),
            ("MTP heads", (self.heads or not self.drafter) and f"{found}, {self.heads_source or self.source}"),
            ("drafting" if self.heads_source else "drafter" if self.drafter else "heads", parts if drafts else ""),
            ("LM heads", self.heads and self.lm_head),
            ("adapters", self.adapter or ", ".join(name for name, _ in self.adapters)),
            ("self-test", shares and f"the first head agrees with the target{adapted} on {shares}{whole}{few}"),
            *(("", found and f"with adapter {name} on {_shares(found)}") for name, found in self.adapters),
            ("self-test", self.untested and "before the first draft, when the heads' weights are read and checked"),
            ("drafts", before and f"from {left:,} of {before:,} tokens, {size(abs(self.saved_bytes))} {change}"),
            ("vision", self.vision),
            ("ranks", self.ranks > 1 and f"{self.ranks}, each with its part of the target's layers and whole heads"),
            ("norms", self.norms),
            ("precision", self.expanded and "expanded to float32: MLX multiplies experts on a CPU in nothing else"),
            *(("" if i else "kernels", line) for i, line in enumerate(lines)),
            ("prefill", self.prefill_chunk and f"{self.prefill_chunk:,} tokens of a prompt at a time"),
            ("not exact", exact and f"{exact}: bits may depend on the number of rows"),
            *(("" if i else "rows", line) for i, line in enumerate(wrap(self.rows))),
            ("not used", listed(self.ignored)),
        )


def _shares(agreement: AgreementRates) -> str:
    return ", ".join(f"{share:.0%} of {kind}" for kind, share in agreement)


def table(*rows: tuple[str, Any]) -> str:
    """Return a line for each (name, value) whose value is not empty."""
    return "\n".join(f"{name:<10} {text}" for name, text in rows if text)


def listed(names: Sequence[str]) -> str:
    """Return, as text, the first LISTED names and the number of the others; "" for no names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def size(n: int) -> str:
    """Return a number of bytes as text with its unit: GB from 0.1 GB on, else MB."""
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"


def make_report(model: Any, config: dict, **load: Any) -> Report:
    """Return the report of a model that was loaded with this config.json.

    load: Report's fields that are not read from the model, at least `source` and `norms`.
    """
    modules = dict(model.named_modules())
    heads = {path: m for path, m in modules.items() if path.startswith(tuple(f"{name}." for name in DRAFTING))}
    target = {path: m for path, m in modules.items() if path not in heads}
    head_bytes = drafting_bytes(model)
    return Report(
        family=config.get("model_type", "a drafter"),
        layers=len(model.layers),
        target_bytes=nbytes(model.parameters()) - head_bytes,
        target_quantization=quantization(target),
        heads=len(model.mtp),
        declared=declared_heads(config),
        head_bytes=head_bytes,
        head_quantization=quantization(heads),
        lm_head=lm_heads(model.mtp),
        drafter=getattr(getattr(model, "drafter", None), "summary", ""),
        **load,
    )


def drafting_bytes(model: Any) -> int:
    """Return the bytes of the parts of a model that draft: its MTP heads and its drafter."""
    return nbytes([model.get(name, []) for name in DRAFTING])


def declared_heads(config: dict) -> int | None:
    """Return the number of heads that a config.json or its text_config declares, None if they declare none."""
    text = config | config.get("text_config", {})
    return next((text[name] for name in DECLARED if name in text), None)


def lm_heads(heads: Any) -> str:
    """Return, for the report, whether the MTP heads have LM heads of their own or use the target's.

    "Shared" as soon as one head has none of its own. heads: one or more.
    """
    if not all("head" in head for head in heads):
        return "shared with the target"
    if len(heads) == 1 and "d2t" in heads[0]:
        return f"own, of {heads[0].d2t.size} tokens"
    return "own, one per depth"


def quantization(modules: Mapping[str, nn.Module]) -> str:
    """Return the quantization formats of modules, each with its number of modules, as text.

    Without quantized modules, the text is "not quantized", with the type of the first matrix, if there is one.
    """
    quantized: Any = [m for m in modules.values() if hasattr(m, "bits")]
    kinds = Counter(f"{m.bits}-bit {getattr(m, 'mode', 'affine')} g{m.group_size}" for m in quantized)
    if kinds:
        return ", ".join(f"{kind} ({count} modules)" for kind, count in sorted(kinds.items()))
    weights = [a for m in modules.values() for a in m.values() if isinstance(a, mx.array) and a.ndim > 1]
    return f"not quantized ({str(weights[0].dtype).rpartition('.')[2]})" if weights else "not quantized"
