"""Write what `mlx-mtp inspect` found as rows of a table."""

from ..checkpoint.inspect import Inspection, PartSummary
from ..checkpoint.report import listed, size, table

STORED = {True: "stored zero-centred, shifted by +1 while loading", False: "stored as they are used"}


def as_text(facts: Inspection) -> str:
    """Write the facts, without rows for what is not there."""
    layers = "" if facts.layers is None else f", {facts.layers} layers"
    report = facts.report
    rows = [
        ("family", f"{facts.family}{layers}" if facts.family else "not known"),
        ("layout", facts.layout),
        ("target", _part(facts.target)),
        ("experts", f"of the target's: {_part(facts.experts)}" if facts.experts.tensors else None),
        ("MTP heads", _heads(facts)),
        ("heads", _part(facts.heads) if facts.heads.tensors else None),
        ("missing", listed(facts.missing) if facts.missing else None),
        ("LM heads", report.lm_head if report and report.heads else None),
        ("norms", _norms(facts) if facts.zero_centred and facts.norms else None),
        *_memory(facts),
        ("not used", listed(report.ignored) if report and report.ignored else None),
        *(("warning", text) for text in facts.warnings),
        *(("problem", text) for text in facts.problems),
    ]
    return table((name, text) for name, text in rows if text is not None)


def _part(part: PartSummary) -> str:
    if not part.tensors:
        return "no tensors"
    types = ", ".join(f"{name} ({size(n)})" if len(part.types) > 1 else name for name, n in part.types.items())
    loaded = "" if part.loaded is None else f"; {size(part.loaded)} once loaded, {part.quantization}"
    return f"{size(sum(part.types.values()))} in {part.tensors:,} tensors, stored as {types}{loaded}"


def _heads(facts: Inspection) -> str:
    declared = "" if facts.declared is None else f", {facts.declared} declared"
    count = len(facts.missing)
    state = f"; {count} tensor{'s' * (count != 1)} missing" if count else "; no tensor missing" * bool(facts.depths)
    return f"{facts.depths} found{declared}{state}"


def _norms(facts: Inspection) -> str:
    """Say how the norms of each part that is there are stored."""
    parts = zip(("the target's", "the heads'"), (facts.target, facts.heads), facts.zero_centred or (), strict=True)
    states = {name: STORED[centred] for name, part, centred in parts if part.tensors}
    means = ", ".join("not a number" if value is None else f"{value:.2f}" for value in facts.norms)
    alike = set(states.values()) if len(set(states.values())) == 1 else ()
    return "; ".join(alike or (f"{name} {state}" for name, state in states.items())) + f" (their means: {means})"


def _memory(facts: Inspection) -> list[tuple[str, str]]:
    memory = facts.memory
    if memory is None:
        return []
    heads = f", the heads' by {size(memory.head_kv)}" if memory.head_kv else ""
    of = f" of {facts.longest:,}" if facts.longest else ""
    return [
        ("KV", f"grow by {size(memory.kv)} with 1,000 tokens{heads}"),
        ("memory", f"{size(memory.least)} at least; {size(memory.available)} here ({memory.limit})"),
        ("fits", f"a context of {memory.context:,}{of} tokens" if memory.context else "not on this machine"),
    ]
