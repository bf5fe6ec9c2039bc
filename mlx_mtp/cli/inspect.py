"""`mlx-mtp inspect`: what a checkpoint holds, from its headers."""

import gc
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from .terminal import printable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..checkpoint.inspect import Inspection, Memory, Part

STORED = {True: "stored zero-centred, shifted by +1 while loading", False: "stored as they are used"}


@click.command("inspect")
@click.argument("path")
@click.option("--revision", help="Branch, tag or commit of a Hugging Face repository.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON object.")
def inspect(path: str, revision: str | None, as_json: bool) -> None:
    """Say what the checkpoint at PATH holds, and whether it loads.

    PATH is a directory or a Hugging Face repository. Headers are read, and the values of norms: no weights, and none
    are downloaded. Exit code 1 where it does not load.
    """
    from ..checkpoint.files import local
    from ..checkpoint.inspect import inspect_checkpoint

    directory = local(path)
    if directory is None:
        from ..checkpoint.hub_headers import downloaded, headers_only

        directory = downloaded(path, revision)
    gc.disable()  # 100,000 tensors are many small objects, all of them in use
    try:
        if directory is None:
            with headers_only(path, revision) as directory:
                facts = _named(inspect_checkpoint(directory, values=False), directory, path)
        else:
            facts = inspect_checkpoint(directory)
    finally:
        gc.enable()
    click.echo(json.dumps(asdict(facts), indent=2) if as_json else printable(_text(facts)))
    if facts.problems:
        raise click.ClickException(facts.problems[0])


def _named(facts: "Inspection", directory: "Path", name: str) -> "Inspection":
    """The facts with the repository's name in place of a directory that is gone."""
    texts = {
        key: tuple(t.replace(str(directory), name) for t in getattr(facts, key)) for key in ("warnings", "problems")
    }
    return replace(facts, path=name, **texts)


def _text(facts: "Inspection") -> str:
    """The facts as rows of a table."""
    from ..checkpoint.report import listed, table

    layers = "" if facts.layers is None else f", {facts.layers} layers"
    rows = [("family", f"{facts.family}{layers}" if facts.family else "not known"), ("layout", facts.layout)]
    rows.append(("target", _part(facts.target)))
    if facts.experts.tensors:
        rows.append(("experts", f"of the target's: {_part(facts.experts)}"))
    rows.append(("MTP heads", _heads(facts)))
    if facts.heads.tensors:
        rows.append(("heads", _part(facts.heads)))
    if facts.missing:
        rows.append(("missing", listed(facts.missing)))
    if facts.report and facts.report.heads:
        rows.append(("LM heads", facts.report.lm_head))
    if facts.zero_centred and facts.norms:
        rows.append(("norms", _norms(facts)))
    rows += _memory(facts.memory, facts.longest) if facts.memory else []
    if facts.report and facts.report.ignored:
        rows.append(("not used", listed(facts.report.ignored)))
    rows += [("warning", text) for text in facts.warnings]
    rows += [("problem", text) for text in facts.problems]
    return table(rows)


def _part(part: "Part") -> str:
    from ..checkpoint.report import size

    if not part.tensors:
        return "no tensors"
    types = ", ".join(part.types) if len(part.types) < 2 else _share(part.types)
    text = f"{size(sum(part.types.values()))} in {part.tensors:,} tensors, stored as {types}"
    if part.loaded is None:
        return text
    return f"{text}; {size(part.loaded)} once loaded, {part.quantization}"


def _share(types: "Mapping[str, int]") -> str:
    from ..checkpoint.report import size

    return ", ".join(f"{name} ({size(n)})" for name, n in types.items())


def _heads(facts: "Inspection") -> str:
    declared = "" if facts.declared is None else f", {facts.declared} declared"
    count = len(facts.missing)
    state = f"; {count} tensor{'s' * (count != 1)} missing" if count else "; no tensor missing" * bool(facts.depths)
    return f"{facts.depths} found{declared}{state}"


def _norms(facts: "Inspection") -> str:
    """How the norms of each part that is there are stored."""
    parts = zip(("the target's", "the heads'"), (facts.target, facts.heads), facts.zero_centred or (), strict=True)
    states = {name: STORED[centred] for name, part, centred in parts if part.tensors}
    means = ", ".join("not a number" if value is None else f"{value:.2f}" for value in facts.norms)
    if len(set(states.values())) == 1:
        return f"{next(iter(states.values()))} (their means: {means})"
    return "; ".join(f"{name} {state}" for name, state in states.items()) + f" (their means: {means})"


def _memory(memory: "Memory", longest: int | None) -> list[tuple[str, str]]:
    from ..checkpoint.report import size

    heads = f", the heads' by {size(memory.head_kv)}" if memory.head_kv else ""
    of = f" of {longest:,}" if longest else ""
    fits = f"a context of {memory.context:,}{of} tokens" if memory.context else "not on this machine"
    return [
        ("KV", f"grow by {size(memory.kv)} with 1,000 tokens{heads}"),
        ("memory", f"{size(memory.least)} at least; {size(memory.available)} here ({memory.limit})"),
        ("fits", fits),
    ]
