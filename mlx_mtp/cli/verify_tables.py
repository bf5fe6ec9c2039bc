"""Format the result of `mlx-mtp verify-lossless`: tables, or a dictionary for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..decoding.summary import kept_of_trees, paused, percentages
from ..lossless.check import Verdict
from ..lossless.compare import Comparison, Difference
from ..lossless.sampled import HOTTER

LISTED = 20  # maximum number of differences to list
WIDTH = 110  # columns of a table if the output is not a terminal


def show(model: Any, tokenizer: Any, verdict: Verdict) -> None:
    """Print a verdict as tables."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH
    print_text = partial(console.print, markup=False, soft_wrap=True)
    print_text(f"{model.report}\n")
    console.print(_ways("greedy, compared with the text without drafts", verdict.greedy))
    if d := verdict.drift:
        share = f"{d.share:.0%} of the rounding tolerance"
        console.print(f"logprobs of drafted text differ by at most {d.change:.2g} ({share})\n")
    if verdict.sampled:
        console.print(_ways("sampled, compared with the text of the same seed without drafts", verdict.sampled))
    for f in verdict.fits:
        console.print(
            f"{f.mode} draws: {f.tokens} tokens have the target's probabilities with p = {f.p:.2g} (chi-squared "
            f"{f.statistic:.1f}, {f.freedom} degrees; of {HOTTER}x the temperature {f.power:.1%} would be refused)"
        )
    differences = [d for comparison in (*verdict.greedy, *verdict.sampled) for d in comparison.differences]
    if differences:
        console.print(_differences(tokenizer, differences, verdict.dtype))
    if verdict.agreement:
        console.print(_heads(verdict))
        console.print(
            "{} drafts accepted, one per head and cycle; these predictions would allow {}\n".format(*verdict.kept)
        )
    if verdict.seen:
        print_text(_sight(verdict))
    for kind in ("warnings", "broken"):
        for text in getattr(verdict, kind):
            print_text(f"{kind.removesuffix('s')}: {text}")
    print_text(_sum(verdict, differences))


def _table(title: str, left: Sequence[str], right: Sequence[str], caption: str | None = None) -> Table:
    """Return a table with left columns for names and right columns for figures."""
    figures = (Column(name, justify="right") for name in right)
    return Table(*left, *figures, title=title, title_justify="left", caption=caption)


def _ways(title: str, comparisons: list[Comparison]) -> Table:
    table = _table(title, ["drafting"], ["texts", "tokens", "near-ties", "divergences", "tok/cycle"])
    table.add_column("drafts accepted, per depth")
    for c in comparisons:
        near = sum(difference.near_tie for difference in c.differences)
        speed = f"{c.stats.tokens_per_cycle:.2f}" if c.stats.cycles else ""
        kept = [percentages(c.stats.by_depth)]
        if c.stats.lookups:
            kept.append(f"looked up {c.stats.lookup_accepted} of {c.stats.lookup_drafted}")
        if c.stats.trees:
            kept.append(kept_of_trees(c.stats))
        kept.append(paused(c.stats.paused))
        counts = (c.prompts, c.tokens, near, len(c.differences) - near)
        table.add_row(c.way, *map(str, counts), speed, ", ".join(filter(None, kept)))
    return table


def _differences(tokenizer: Any, differences: list[Difference], dtype: str) -> Table:
    caption = f"logits of a forward pass over the plain text; tolerance: possible rounding error in {dtype}"
    if len(differences) > LISTED:
        caption = f"{LISTED} of {len(differences)}, divergences first; {caption}"
    right = ["token", "without", "with", "logits", "gap", "tolerance"]
    table = _table("differences", ["", "prompt", "drafting"], right, caption)
    for d in sorted(differences, key=lambda d: d.near_tie)[:LISTED]:
        texts = ["(end)" if t is None else repr(tokenizer.decode([t])) for t in (d.plain, d.drafted)]
        figures = ["", "", ""]
        if j := d.judgement:
            figures = ["{:.5g} {:.5g}".format(*j.logits), f"{j.gap:.2g}", f"{j.tolerance:.2g}"]
        verdict = "near-tie" if d.near_tie else "DIVERGES"
        table.add_row(verdict, d.prompt, d.way, str(d.position), *map(Text, texts), *figures)
    return table


def _heads(verdict: Verdict) -> Table:
    depths = [f"depth {depth}" for depth in range(1, len(verdict.agreement) + 1)]
    table = _table("predictions equal to the target's token, on the plain texts", ["heads"], depths)
    predictions = [("as wired", verdict.agreement), *((b.wiring, b.after) for b in verdict.better)]
    for wiring, shares in predictions:
        table.add_row(wiring, *(f"{share:.1%}" for share in shares))
    return table


def _sight(verdict: Verdict) -> str:
    """Return the result of the test with opposite pairs of pictures in one line."""
    kinds = ", ".join(f"{kind} {right} of {count}" for kind, (right, count) in verdict.seen.items())
    pairs = f"{verdict.pairs_seen} of {verdict.pairs} opposite pairs of pictures ({kinds})"
    return f"sees: {pairs}; this tests the wiring of pictures, not exactness\n"


def _sum(verdict: Verdict, differences: list[Difference]) -> str:
    """Return the verdict in one line: lossless, or the kind of the deviation."""
    if diverged := sum(not d.near_tie for d in differences):
        return f"NOT LOSSLESS: {diverged} divergences"
    if any(f.refused for f in verdict.fits):
        return "NOT LOSSLESS: sampled texts have other probabilities"
    tokens = sum(c.tokens for c in (*verdict.greedy, *verdict.sampled))
    near = f"{len(differences)} near-ties" if differences else "no near-tie"
    but = "; but see the faults above" if verdict.broken else ""
    return f"lossless in {verdict.dtype}: {tokens:,} tokens compared, {near}{but}"


def as_dict(model: Any, verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a dictionary for JSON."""
    return {
        "lossless": not verdict.diverged,
        **{name: getattr(verdict, name) for name in ("broken", "warnings", "dtype")},
        "device": str(mx.default_device()),
        **{name: getattr(model.report, name) for name in ("family", "kernels", "not_exact")},
        **{name: [_comparison(c) for c in getattr(verdict, name)] for name in ("greedy", "sampled")},
        "logprobs": verdict.drift and asdict(verdict.drift),
        "distributions": [asdict(f) for f in verdict.fits],
        "heads": {"right": verdict.agreement, "better_wirings": [asdict(b) for b in verdict.better]},
        "sees": {kind: {"right": a, "pairs": b} for kind, (a, b) in verdict.seen.items()},
    }


def _comparison(c: Comparison) -> dict[str, Any]:
    differences = [
        {**asdict(d), "judgement": d.judgement and d.judgement._asdict(), "near_tie": d.near_tie}
        for d in c.differences
    ]
    figures = {"tokens_per_cycle": c.stats.tokens_per_cycle, "kept_per_depth": c.stats.by_depth}
    return {"drafting": c.way, "texts": c.prompts, "tokens": c.tokens, **figures, "differences": differences}
