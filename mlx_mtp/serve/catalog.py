"""List the models that a server for several models can load, from their files' headers and config.json."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.gguf.cached import is_gguf
from ..checkpoint.gguf.inspect import inspect_gguf
from ..checkpoint.inspect import inspect_checkpoint
from ..checkpoint.library import LocalModel, below
from ..checkpoint.load import check_tokenizer
from ..decoding.memory_needs import LONGEST, UNCHECKED
from ..machine.errors import first_line, without_directories


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model, which need no load.

    name: in requests. path: its directory or GGUF file. problem: why it cannot be served, else "". With a problem the
    fields below have their defaults (0, "", False).
    context: maximum tokens of prompt and answer together. needed: estimated bytes of memory for the load and a
    context of UNCHECKED tokens, or of `context` if that is less. size: bytes of the weights in memory, of target and
    heads. family: the model_type. stored: the weights' formats in memory. created: time of the last change of
    `path`, in seconds since 1970. sees: the model reads pictures. adapter: name of the adapter that requests for this
    name select, "" for none. digest: 64 hex digits, from path, size, adapter and the time of the last change of
    `path`.

    A server of one loaded model has no `needed` for it; `created` is the time of its load.
    """

    name: str
    path: Path = Path()
    problem: str = ""
    context: int = 0
    needed: int = 0
    size: int = 0
    family: str = ""
    stored: str = ""
    created: int = 0
    sees: bool = False
    adapter: str = ""

    @property
    def shown_problem(self) -> str:
        """`problem` for clients: of a path on the server only the last name."""
        return without_directories(self.problem, self.path.parent)

    @property
    def digest(self) -> str:
        changed = 0
        with contextlib.suppress(OSError):  # the files were removed after the load
            changed = self.path.stat().st_mtime_ns if self.path != Path() else 0
        facts = str(self.path), self.size, changed, self.adapter
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def offers(
    models: Iterable[tuple[str, Path]], folder: Path | None, limit: int | None = None, *, code: bool = False
) -> list[ModelFacts]:
    """Return an `ModelFacts` of each given model, then of each other model in a folder and up to four levels below.

    models: pairs of name and path; of pairs with the same path only the first counts. A model of the folder has
    the name of its directory or file, or its path in the folder if another model has that name, too; of several paths
    to it, one without links counts, else the first. limit: maximum of the contexts; None: those of the models. Models
    that cannot be served are included, with a `problem`. code: whether code of tokenizers may be run.
    """
    known: dict[Path, tuple[str, Path]] = {}
    for name, path in models:
        known.setdefault(path.resolve(), (name, path))
    given = [*known.values()]
    found = [place for place in _in_folder(folder) if place.path.resolve() not in known] if folder else []
    times = Counter([*(name for name, _ in given), *(place.name for place in found)])
    for place in found:
        within = place.path.relative_to(folder or Path()).as_posix()
        given.append((place.name if times[place.name] == 1 else within, place.path))
    return [offer(name, path, limit, code=code) for name, path in given]


def _in_folder(folder: Path) -> list[LocalModel]:
    """Return the models of a folder, each once: with its path without links if there is one, else the first."""
    found = [*below(folder, names=1)]
    linked = {place: place.path.resolve() != folder.resolve() / place.path.relative_to(folder) for place in found}
    kept: dict[Path, LocalModel] = {}
    for place in sorted(found, key=linked.__getitem__):
        kept.setdefault(place.path.resolve(), place)
    return [place for place in found if kept[place.path.resolve()] == place]


def offer(name: str, path: Path, limit: int | None = None, *, code: bool = False) -> ModelFacts:
    """Return a model's facts; the first error or problem becomes its `problem`. limit, code: as in `offers`."""
    try:
        facts = inspect_gguf(path)[1] if is_gguf(path) else inspect_checkpoint(path, values=False)
        problem = next(iter(facts.problems), "")
        if not problem and not is_gguf(path):
            check_tokenizer(path, code=code)
    except Exception as e:
        facts, problem = None, first_line(e)
    if problem or facts is None or facts.memory is None or facts.report is None:
        return ModelFacts(name, path, problem or f"{path}: its memory cannot be estimated")
    report, memory = facts.report, facts.memory
    per_token = (memory.kv + memory.head_kv) // 1000
    longest = facts.longest or _of_tokenizer(path)
    longest = min(longest, limit or longest)
    return ModelFacts(
        name,
        path,
        context=longest,
        needed=memory.least + per_token * min(longest, UNCHECKED),
        size=report.target_bytes + report.head_bytes,
        family=report.family,
        stored=report.target_quantization,
        created=int(path.stat().st_mtime),
        sees=bool(facts.vision.tensors),
    )


def _of_tokenizer(path: Path) -> int:
    """Return model_max_length of tokenizer_config.json; UNCHECKED unless it is an integer from 1 to LONGEST."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = json.loads((path / "tokenizer_config.json").read_text("utf-8")).get("model_max_length")
        return found if type(found) is int and 0 < found <= LONGEST else UNCHECKED
    return UNCHECKED
