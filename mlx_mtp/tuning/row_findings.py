"""Keep the findings of a check of rows in a file, for later loads of this model on this machine."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ..machine.remembered import RememberedFile, digest
from .cost_file import backend
from .verdict_file import kernel_facts

NUMBERS = (1, 2, 4, 8, 16)  # rows of a pass; a single row shows whether a position on the device changes its bits
EVERY = NUMBERS[-1]


class RowFinding(NamedTuple):
    """The finding at one context.

    passed: the largest number of rows up to which every number is right, at least 1. failed: the first number that
    is wrong, 0 if none is. module: path of the module whose rows then differ; "" for operations outside of modules.
    """

    passed: int
    failed: int = 0
    module: str = ""


Findings = dict[int, RowFinding]  # by context: the position of the first row


class RememberedRows:
    """The file of findings for one model, layout of caches and set of kernels, on one machine with this MLX.

    weights: a fingerprint of the target. exact: whether bits are compared.
    """

    def __init__(self, model: Any, weights: str, layout: Mapping[str, Any], *, exact: bool):
        classes = {f"{path} {type(m).__module__}.{type(m).__qualname__}" for path, m in model.named_modules()}
        on = [f"{s.op} {s.shape} {sorted(s.rows)} {sorted(s.split)} {_contexts(s)}" for s in model.runtime.sites]
        given = {name: value for name, value in layout.items() if value is not None}
        facts = {**kernel_facts(digest([weights, *classes])), **backend(), "lane": digest(on), "layout": given}
        self.facts = {**facts, "exact": exact}
        self._file = RememberedFile("rows", self.facts, "which rows are exact cannot be kept for the next load")

    def recall(self) -> Findings:
        """Return the stored findings; {} without a valid file of these facts."""
        try:
            return {int(context): _parsed(*entry) for context, entry in self._file.recall()["found"].items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            return {}

    def keep(self, found: Findings) -> None:
        """Replace the stored findings; if the file cannot be written, warn once."""
        self._file.keep(found={str(context): finding for context, finding in found.items()})


def _contexts(site: Any) -> list[tuple[int, list[int]]]:
    return sorted((context, sorted(rows)) for context, rows in site.rows_of_context.items())


def _parsed(passed: Any, failed: Any, module: Any) -> RowFinding:
    """Return a stored finding; ValueError if `keep` did not write it."""
    good = passed in NUMBERS and (failed == 0 or failed in NUMBERS) and isinstance(module, str)
    if not (type(passed) is int and type(failed) is int and good):
        raise ValueError(passed)
    return RowFinding(passed, failed, module)


def rows_in_words(found: Findings, missing: Sequence[str], *, exact: bool) -> str:
    """Return findings as the text of a report's line. missing: what was not covered."""
    how, lines = "bit for bit" if exact else "within rounding", []
    for finding, group in groupby(sorted(found.items()), key=lambda item: item[1]):
        contexts = ", ".join(f"{context:,}" for context, _ in group)
        text = f"up to {finding.passed} of a pass equal the same rows alone, {how}, at context {contexts}"
        where = finding.module or "the model's own operations"
        lines.append(text + (f" (with {finding.failed} rows {where} differs)" if finding.failed else ""))
    return "; ".join([*lines, *(f"not covered: {what}" for what in missing)])
