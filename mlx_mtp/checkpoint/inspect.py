"""Inspect a checkpoint directory: list its contents and whether it loads, from headers and the values of norms.

The loader itself decides: the model is loaded with `load_model(lazy=True)`, which reads no matrices.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..cache.make_cache import make_prompt_cache
from ..decoding.buffer_count import CONVERSATION, LEAST_CHUNK, Buffers, count_buffers
from ..decoding.graph_memory import nbytes
from ..decoding.memory_needs import LONGEST, kv_bytes, largest_context, needs
from ..layers.block_drafter import BlockNetwork
from ..machine.errors import first_line, with_type
from ..machine.memory import METAL_BUFFERS, available
from ..models import find_port
from ..ranks.split import RankShare, take_part
from .block_drafter import block_facts
from .build import check_vectors, open_drafter, read_args
from .files import Header, read_config, read_header, stored_types
from .find_drafter import is_drafter
from .load import load_model
from .norm_conventions import conventions, mean
from .packed.contents import recognize
from .packed.find import replaced, without_scales
from .parameters import expected, named, same
from .report import Report, declared_heads, listed, quantization, size, table
from .sort_tensors import Contents, ignored_by, layout_of, missing_experts, of_other_layout, relative
from .vision import find_tower_files
from .weight_files import read_stored, weight_files

LONG = 1 << 16  # positions; sliding-window caches no longer grow
MAX_MISSING_EXPERTS = 1000  # a damaged name can cause any number
EXPERTS = re.compile(r"\.(experts|switch_mlp|moe)\.(?!gate\.|router)")
CONVERTED = re.compile(r"\.switch_mlp\.|\.scales$")  # names in MLX's checkpoints only
WRITERS = {"pt": "as released", "mlx": "written by MLX, names as released"}  # by a file's metadata
STORED = {True: "stored zero-centred, shifted by +1 while loading", False: "stored as they are used"}


@dataclass(frozen=True)
class PartSummary:
    """Sizes of the target, of its experts (which are included in the target), of the heads or of the vision tower.

    tensors: their number. types: bytes in the files by stored type ("BF16", "F8_E4M3", "U32", ...). loaded: bytes in
    memory; quantization: description of the formats in memory; both None if the model does not load. loaded is also
    None without a usable vision tower, and quantization for any vision tower, and for experts or heads that the model
    lacks.
    """

    tensors: int
    types: Mapping[str, int]
    loaded: int | None
    quantization: str | None


@dataclass(frozen=True)
class MemoryFit:
    """Bytes that the model needs on this machine, and bytes available.

    kv, head_kv: growth of the target's and the heads' caches per 1,000 tokens, once windows are full. least: needed
    with a context of one token. available, limit: available bytes, and the name of the limit. context: maximum number
    of tokens that fit, at most the model's own maximum; 0 if the model does not fit.
    """

    kv: int
    head_kv: int
    least: int
    available: int
    limit: str
    context: int


@dataclass(frozen=True)
class Inspection:
    """The facts about a checkpoint; None or empty if unknown, because of `problems`, config.json or values=False.

    vision: the vision tower's sizes; no tensors if none was found.
    depths, declared: number of MTP heads found, and in config.json. head_tensors, missing: names of heads' tensors
        that were found, and that are missing.
    zero_centred: for target and heads, whether norms are stored zero-centred; norms: for each that has tensors, the
        mean of the stored layer norms (None: not finite). Both are empty for families whose norms never are.
    longest: the model's maximum context. report: the loader's. memory: on one of `ranks` machines that share the
        target; part: each one's bytes of the target (None: not split).
    buffers: estimated Metal buffers of the model and of a conversation of min(CONVERSATION, longest) tokens, which
        the server's prefix cache stores in its shortest chunks.
    warnings: of the load and the other checks. problems: their errors; without any problem, the checkpoint loads.
    """

    path: str
    family: str | None
    layers: int | None
    layout: str
    target: PartSummary
    experts: PartSummary
    heads: PartSummary
    vision: PartSummary
    depths: int
    declared: int | None
    head_tensors: tuple[str, ...]
    missing: tuple[str, ...]
    zero_centred: tuple[bool, bool] | None
    norms: tuple[float | None, ...]
    longest: int | None
    report: Report | None
    memory: MemoryFit | None
    buffers: Buffers | None
    ranks: int
    part: int | None
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    def at(self, path: str | Path) -> "Inspection":
        """Return the same facts for another path, also in messages."""
        warned, wrong = ([t.replace(self.path, str(path)) for t in each] for each in (self.warnings, self.problems))
        return replace(self, path=str(path), warnings=tuple(warned), problems=tuple(wrong))


def inspect_checkpoint(path: Path, *, values: bool = True, ranks: int = 1) -> Inspection:
    """Return the facts about a checkpoint directory; errors are listed in `problems`, and warnings in the result.

    values: also check vectors for NaN, compare those of heads, and report stored norms; False adds to the headers
    only what a lazy load reads.
    ranks: number of machines that share the target.
    """
    problems: list[str] = []
    tried = partial(_try, problems)
    config: dict[str, Any] = tried(read_config, path) or {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = tried(load_model, path, lazy=True, kernels="off")
    messages = [str(warning.message) for warning in warned]
    stored = tried(read_stored, path)
    header: Header = stored.trunk | stored.sidecars if stored else {}
    for name in [] if stored else weight_files(path):
        header |= tried(read_header, [path / name]) or {}
    if stored and model is None:
        problems += (stored.unread | stored.unread_sidecars).values()
    port = find_port(config) if config else None
    contents = tried(_sort, port, path, config, header) if port else None
    contents = contents or Contents(header, {}, 0, "", (), None)  # type: ignore[arg-type] - no heads, no spec
    contents = replace(contents, packed=tried(recognize, path, config, contents.trunk | contents.heads, stored) or {})
    centred = port.Model.ZERO_CENTRED if port and values else None
    layouts = [without_scales(part, contents.packed) for part in (contents.trunk, contents.heads)]
    if model is not None and values:
        tried(check_vectors, model, contents)
        messages += tried(_repeated, model, path) or []
    if model is None and is_drafter(path):
        problems.insert(0, f"{path}: a drafter, for --draft-model with its target; not a model{_drafter_facts(path)}")
    tower = tried(find_tower_files, path, config, stored, None) if stored and port else None
    parts = _parts(contents, model, tower.tensors if tower else {})
    longest = _number(config, "max_position_embeddings")
    part = tried(_part_of, model, ranks, config) if model is not None and ranks > 1 else None
    return Inspection(
        path=str(path),
        family=config.get("model_type"),
        layers=_number(config, "num_hidden_layers"),
        layout=_layout(path, header, contents.heads),
        **parts,
        depths=contents.depths,
        declared=declared_heads(config),
        head_tensors=tuple(sorted(contents.heads)),
        missing=tuple(tried(_missing, port, path, config, contents) or ()) if contents.spec else (),
        zero_centred=tried(conventions, centred, *layouts) if centred else None,
        norms=tried(_means, contents.trunk, contents.heads) or () if centred else (),
        longest=longest,
        report=model.report if model else None,
        memory=tried(_memory, model, longest) if model else None,
        buffers=tried(_buffers, model, longest) if model else None,
        ranks=ranks,
        part=part,
        warnings=tuple(messages),
        problems=tuple(dict.fromkeys(problems)),
    )


def _try(problems: list[str], function: Callable, *args: Any, **options: Any) -> Any:
    """Return a function's result; if it raises, append the error to `problems`, in one line, and return None."""
    try:
        return function(*args, **options)
    except Exception as e:
        problems.append(first_line(e) if isinstance(e, ValueError) else with_type(e))


def _drafter_facts(path: Path) -> str:
    """Return `block_facts` of a block drafter's directory, in brackets; "" for other drafters and unreadable ones."""
    with suppress(ValueError):
        net = open_drafter(path)[1].mtp[0]
        return f" ({block_facts(net)})" if isinstance(net, BlockNetwork) else ""
    return ""


def _repeated(model: Any, path: Path) -> list[str]:
    """Return a warning for each pair of MTP depths whose vectors (norms, for the most part) are equal."""
    vectors = [{name: a for name, a in named(head).items() if a.ndim == 1} for head in model.mtp]
    return [
        f"{path}: MTP depths {i} and {j} have the same norms, value for value; they look like one head twice"
        for (i, a), (j, b) in combinations(enumerate(vectors), 2)
        if a and same(a, b)
    ]


def _sort(port: ModuleType, path: Path, config: dict, header: Header) -> Contents:
    """Return the sorted tensors, as the loader does, but without its checks: depths may be missing."""
    layers, spec = read_args(port, path, config).num_hidden_layers, layout_of(port, header)
    used = {name: tensor for name, tensor in header.items() if ignored_by(port, name) is None}
    used = {name: tensor for name, tensor in used.items() if not of_other_layout(port, spec, name, layers)}
    places = {name: place for name in used if (place := spec.locate(name, layers))}
    if spec.topology == "recycle":
        places = {name: place for name, place in places.items() if place[0] == 0}
    heads = {name: used[name] for name in places}
    trunk = {name: tensor for name, tensor in used.items() if name not in heads}
    vocab = next((heads[name].shape[0] for name, (_, inside) in places.items() if inside == "d2t"), 0)
    spec = replace(spec, draft_vocab=vocab).resolve([inside for _, inside in places.values()])
    return Contents(trunk, heads, len({depth for depth, _ in places.values()}), "", (), spec)


def _missing(port: ModuleType, path: Path, config: dict, contents: Contents) -> list[str]:
    """Return the names of missing tensors of the heads, found or declared, whichever number is greater.

    Of experts, at most MAX_MISSING_EXPERTS gaps in their numbers are included.
    """
    depths = max(contents.depths, declared_heads(config) or 0)
    if contents.spec.topology == "recycle":
        depths = min(depths, 1)
    model = port.Model(read_args(port, path, config), depths, contents.spec)
    found = {parameter for name in replaced(contents.heads, contents.packed) for parameter in model.renamed(name)}
    lacking = [path for path in named(model) if path.startswith("mtp.") and path not in found]
    experts = [name for name, _, _ in islice(missing_experts(contents.heads), MAX_MISSING_EXPERTS)]
    others = [name for _, name in expected(model, contents, path, lacking)] if lacking else []
    return list(dict.fromkeys([*others, *experts]))


def _layout(path: Path, header: Header, heads: Header) -> str:
    """Return, as text, the files' writer and number, and the names of the files that contain heads only."""
    if not header:
        return "no tensors"
    trunk = {name: tensor for name, tensor in header.items() if name not in heads}
    if any(CONVERTED.search(name) for name in trunk):
        writer = "converted to MLX"
    else:
        writer = WRITERS.get(next((t.format for t in trunk.values() if t.format), ""), "names as released")
    files = {tensor.file for tensor in header.values()}
    apart = {t.file for t in heads.values()} - {t.file for t in trunk.values()}
    text = f"{writer}, {len(files)} file{'s' * (len(files) > 1)}"
    return text + (f", heads in {', '.join(sorted(relative(file, path) for file in apart))}" if apart else "")


def _parts(contents: Contents, model: Any, tower: Header) -> dict[str, PartSummary]:
    """Return the summaries of target, experts, heads and vision tower, by their names in Inspection."""
    experts = {name: tensor for name, tensor in contents.trunk.items() if EXPERTS.search(name)}
    tensors = {"target": contents.trunk, "experts": experts, "heads": contents.heads, "vision": tower}
    loaded: dict[str, Any] = dict.fromkeys(tensors, (None, None))
    if model is not None:
        report, modules = model.report, model.named_modules()
        switched = ((at, m) for at, m in modules if isinstance(m, SwitchLinear | QuantizedSwitchLinear))
        trunk = {at: m for at, m in switched if not at.startswith("mtp.")}
        loaded["target"] = report.target_bytes, report.target_quantization
        loaded["experts"] = nbytes([m.parameters() for m in trunk.values()]), quantization(trunk) if trunk else None
        loaded["vision"] = model.vision and model.vision.nbytes, None
        loaded["heads"] = report.head_bytes, report.head_quantization if report.heads else None
    return {name: PartSummary(len(part), stored_types(part), *loaded[name]) for name, part in tensors.items()}


def _memory(model: Any, longest: int | None) -> MemoryFit:
    empty, room, least = make_prompt_cache(model), available(), needs(model, 1).total
    short, long = kv_bytes(model, empty, LONG), kv_bytes(model, empty, 2 * LONG)
    kv, head_kv = ((b - a) * 1000 // LONG for a, b in zip(short, long, strict=True))
    context = largest_context(model, room.bytes, longest=longest or LONGEST) if least <= room.bytes else 0
    return MemoryFit(kv, head_kv, least, room.bytes, room.limit, context)


def _buffers(model: Any, longest: int | None) -> Buffers:
    return count_buffers(make_prompt_cache(model), min(CONVERSATION, longest or CONVERSATION), LEAST_CHUNK)


def _part_of(model: Any, ranks: int, config: dict) -> int:
    """Reduce the model, which is modified, to one rank's part, and return the bytes of the target that are left.

    config: config.json; ValueError if its model_type cannot be split over these ranks.
    """
    take_part(model, RankShare(ranks), config["model_type"])
    return nbytes(model.parameters()) - nbytes(model.get("mtp", []))


def _means(*parts: Header) -> tuple[float | None, ...]:
    """Return the mean of the stored layer norms of each part that has tensors; None instead of NaN and infinity."""
    means = (mean(part) for part in parts if part)
    return tuple(value if math.isfinite(value) else None for value in means)


def _number(config: dict, name: str) -> int | None:
    value = (config | config.get("text_config", {})).get(name)
    return value if type(value) is int and value > 0 else None


def as_text(facts: Inspection) -> str:
    """Return the facts as lines of text, one per kind of fact, without empty ones."""
    layers = "" if facts.layers is None else f", {facts.layers} layers"
    report = facts.report
    return table(
        ("family", f"{facts.family}{layers}" if facts.family else "not known"),
        ("layout", facts.layout),
        ("target", _part(facts.target)),
        ("experts", facts.experts.tensors and f"of the target's: {_part(facts.experts)}"),
        ("MTP heads", _heads(facts)),
        ("heads", facts.heads.tensors and _part(facts.heads)),
        ("missing", listed(facts.missing)),
        ("LM heads", report and report.heads and report.lm_head),
        ("vision", report and report.vision),
        ("norms", facts.zero_centred and facts.norms and _norms(facts)),
        ("ranks", facts.part and f"{facts.ranks}, with {size(facts.part)} of the target on each; memory is of one"),
        *(_memory_rows(facts.memory, facts.longest) if facts.memory else ()),
        ("buffers", facts.buffers and _buffer_row(facts.buffers, facts.longest)),
        ("not used", report and listed(report.ignored)),
        *(("warning", text) for text in facts.warnings),
        *(("problem", text) for text in facts.problems),
    )


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
    loaded = facts.report.heads if facts.report and not facts.depths else 0
    shipped = f"; mlx-mtp has {loaded}, {facts.report.source}" if facts.report and loaded else ""
    return f"{facts.depths} found{declared}{state}{shipped}"


def _norms(facts: Inspection) -> str:
    """Return how the norms of the target and the heads are stored, with their means."""
    parts = zip(("the target's", "the heads'"), (facts.target, facts.heads), facts.zero_centred or (), strict=True)
    states = {name: STORED[centred] for name, part, centred in parts if part.tensors}
    means = ", ".join("not a number" if value is None else f"{value:.2f}" for value in facts.norms)
    alike = set(states.values()) if len(set(states.values())) == 1 else ()
    return "; ".join(alike or (f"{name} {state}" for name, state in states.items())) + f" (their means: {means})"


def _memory_rows(memory: MemoryFit, longest: int | None) -> list[tuple[str, str]]:
    heads = f", the heads' by {size(memory.head_kv)}" if memory.head_kv else ""
    of = f" of {longest:,}" if longest else ""
    return [
        ("KV", f"grow by {size(memory.kv)} with 1,000 tokens{heads}"),
        ("memory", f"{size(memory.least)} at least; {size(memory.available)} here ({memory.limit})"),
        ("fits", f"a context of {memory.context:,}{of} tokens" if memory.context else "not on this machine"),
    ]


def _buffer_row(buffers: Buffers, longest: int | None) -> str:
    parts = ", ".join(f"{name} {count:,}" for name, count in vars(buffers).items() if count)
    of = f"about {buffers.total:,} of Metal's {METAL_BUFFERS:,}"
    return f"{of}, with a conversation of {min(CONVERSATION, longest or CONVERSATION):,} tokens ({parts})"
