"""Keep the findings of a check of rows in a file, for later loads of this model on this machine."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from ..machine.remembered import RememberedFile, digest
from .cost_file import backend
from .verdict_file import kernel_facts

NUMBERS = (1, 2, 4, 8, 16)  # rows of a pass; 1: a position on the device may change the bits of a single row
EVERY = NUMBERS[-1]


class RowFinding(NamedTuple):
    """The finding at one context. passed: the largest of NUMBERS up to which all are right, 0 if none is.

    differs: the path of the module, or other part, whose rows differ in a pass of the next number of rows; "" if none
    differs.
    """

    passed: int
    differs: str = ""


Findings = dict[int, RowFinding]  # by context: the position of the first row


def file_of_rows(model: Any, weights: str, layout: Mapping[str, Any], *, exact: bool) -> RememberedFile:
    """Return the file of findings for one model, layout of caches, lane and kernels, on this machine with this MLX.

    weights: a fingerprint of the target. exact: whether bits are compared.
    """
    classes = {f"{path} {type(m).__module__}.{type(m).__qualname__}" for path, m in model.named_modules()}
    lane = [f"{s.op} {s.shape} {sorted(s.rows)} {sorted(s.split)} {s.rows_of_context}" for s in model.runtime.sites]
    lane.append(model.runtime.lane_key)
    names = ("max_kv_size", *(("kv_bits", "kv_group_size", "quantized_kv_start") if layout.get("kv_bits") else ()))
    given = {name: layout.get(name) for name in names}
    facts = {**kernel_facts(digest([weights, *classes])), **backend(), "lane": digest(lane), "layout": given}
    return RememberedFile("rows", {**facts, "exact": exact}, "which rows are exact cannot be kept for the next load")


def recalled(file: RememberedFile) -> Findings:
    """Return the findings in a file; {} if it is missing or damaged."""
    try:
        found = {int(context): RowFinding(*each) for context, each in file.recall()["found"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}
    good = all(type(f.passed) is int and f.passed in (0, *NUMBERS) and type(f.differs) is str for f in found.values())
    return found if good else {}


def rows_in_words(found: Findings, left_out: Mapping[int, str], *, exact: bool) -> str:
    """Return findings, and the contexts that are not covered with the reasons, as the text of a report's line."""
    how, words = "bit for bit" if exact else "within rounding", []
    for (passed, differs), group in groupby(sorted(found.items()), key=lambda item: item[1]):
        contexts = ", ".join(f"{context:,}" for context, _ in group)
        more = next((n for n in NUMBERS if n > passed), 0)
        failed = f" (with {more} rows {differs} differs)" if differs else ""
        words.append(f"up to {passed} of a pass equal the same rows alone, {how}, at context {contexts}{failed}")
    for why, group in groupby(sorted(left_out.items()), key=lambda item: item[1]):
        words.append(f"not covered: context {', '.join(f'{context:,}' for context, _ in group)} ({why})")
    return "; ".join(words)
