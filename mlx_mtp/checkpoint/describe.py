"""Describe a model of `library`: family, format, size, drafter, whether it fits, and what it lacks."""

from dataclasses import dataclass
from pathlib import Path

from ..models import find_port
from .cure import adding_heads
from .gguf.cached import is_gguf
from .gguf.inspect import inspect_gguf
from .inspect import Inspection, inspect_checkpoint
from .library import LocalModel


@dataclass(frozen=True)
class Description:
    """What `mlx-mtp models` shows of a model; family, stored and context are None where they are unknown.

    size: bytes of its weight files. stored: types and formats of the target. drafts: as `_heads` returns it, "" if
    unknown, or "drafter" for a model that drafts for another one. context: tokens that fit into memory now, 0 if the
    model does not. advice: the command that adds missing heads, or the reason why the model does not load, else "".
    """

    name: str
    path: str
    size: int
    family: str | None
    stored: str | None
    drafts: str
    context: int | None
    advice: str


def describe(place: LocalModel) -> Description:
    """Describe a model from its headers and config.json; no weights are read. An error becomes the advice."""
    facts, problem = None, ""
    try:
        facts = inspect_gguf(place.path)[1] if is_gguf(place.path) else inspect_checkpoint(place.path, values=False)
        problem = next(iter(facts.problems), "")
    except Exception as e:
        problem = str(e).partition("\n")[0]
    is_drafter = facts is not None and "a drafter, for --draft-model" in problem
    drafts = "drafter" if is_drafter else _heads(facts) if facts else ""
    advice = "" if is_drafter else problem or (adding_heads(place.path) if drafts == "missing" else "")
    return Description(
        place.name, str(place.path), _size(place.path), facts.family if facts else None,
        facts.target.quantization if facts else None, drafts,
        facts.memory.context if facts and facts.memory else None, advice,
    )  # fmt: skip


def _heads(facts: Inspection) -> str:
    """Return the number of MTP heads as text, such as "1 head", with "of mlx-mtp" for heads in this package.

    For 0 "missing" if the family has some, or "none".
    """
    if facts.depths:
        return f"{facts.depths} head{'s' * (facts.depths > 1)}"
    if facts.report and facts.report.heads:
        return f"{facts.report.heads} of mlx-mtp"
    port = find_port({"model_type": facts.family}) if facts.family else None
    return "missing" if port and port.Model.SPEC.tensors else "none"


def _size(path: Path) -> int:
    """Return the bytes of a *.safetensors or *.gguf file, or of those in a directory and below."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(f.stat().st_size for f in files if f.is_file() and f.suffix in (".safetensors", ".gguf"))
