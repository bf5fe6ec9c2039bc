"""Save a prompt cache to a file and load it: the state of target and MTP heads, whose it is, and a checksum."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..machine.errors import first_line, naming
from ..machine.memory import check_room
from ..machine.stream import in_turn
from .drafting import no_kept
from .kinds import from_configs
from .layer_cache import CachedModel, CacheKind, LayerCache
from .mark import Quantizing
from .prompt_cache import PromptCache
from .prompt_prefix import PromptPrefix

FORMAT = 2
WHOLE = [0, 1]  # the part of a model that is not split
DIGITS = 64
BLANK = "0" * DIGITS  # where the checksum is to be, while it is taken
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
NUMBERS = ("start", "keep", "bits", "group_size", "offset")  # of layers' configs
PIECE = 1 << 24  # bytes read at a time


@in_turn()
def save_prompt_cache(file: str | Path, cache: PromptCache) -> None:
    """Write a cache that is at rest, heads and their pending rows included, in the safetensors format.

    Of a model that is split each rank writes its part, rank 1 into `file`.rank1 and so on.
    A reader finds the old file or the whole new one. Raises ValueError for what is no file, OSError where it
    cannot be written.
    """
    path = _own_file(file, cache.model)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file, a prompt cache cannot take its place")
    arrays = {f"cache.{i}.{j}": part for i, c in enumerate(cache.caches) for j, part in enumerate(c.used())}
    arrays |= {f"kept.{i}": row for i, row in enumerate(cache.kept)}
    if cache.backlog:
        arrays["backlog"] = mx.concatenate(cache.backlog, axis=1)
    if shutil.disk_usage(path.absolute().parent).free < sum(array.nbytes for array in arrays.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))  # MLX would not say why
    work = path.with_name(f".{path.name}-{uuid.uuid4().hex}.safetensors")
    try:
        _write(work, path, arrays, _state(cache))
        with naming(path), work.open("r+b") as f:
            place, digest = _checksum(f)
            f.seek(place)
            f.write(digest.encode())
            f.flush()
            os.fsync(f.fileno())
        os.replace(work, path)
    except BaseException:
        with contextlib.suppress(OSError):
            work.unlink()
        raise


@in_turn()
def load_prompt_cache(file: str | Path, model: CachedModel, *, check_memory: bool = True) -> PromptCache:
    """Read a cache that `save_prompt_cache` wrote.

    Raises ValueError, with the reason, where it is not one, is damaged, of an older format or another model's, or
    where there is no memory for it; OSError where it cannot be read.
    """
    file = _own_file(file, model)
    with file.open("rb") as f:  # one file from here on, whoever replaces it
        state = _checked(f, file)
        if (part := state.get("part", WHOLE)) != (own := _part(model)):
            raise ValueError(f"{file}: made on rank {part[0]} of {part[1]}; expected {own[0]} of {own[1]}")
        if state.get("model") != fingerprint(model, heads=False):
            raise ValueError(f"{file}: made with another model, or in another precision")
        if model.head_windows() and state.get("heads") and state.get("model_heads") != fingerprint(model, heads=True):
            raise ValueError(f"{file}: made with other MTP heads")
        check_room(f"{file}:", os.fstat(f.fileno()).st_size, ignore=not check_memory)
        f.seek(0)
        try:
            loaded: Any = mx.load(f, format="safetensors")
            cache = _restored(model, state, loaded)
            _check(cache)
            mx.eval(cache.arrays)
        except RuntimeError as e:  # MLX's, whose text is that of its JSON library
            raise ValueError(f"{file}: damaged (its arrays cannot be read)") from e
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, AssertionError) as e:
            raise ValueError(f"{file}: damaged ({first_line(e)})") from e
    return cache


def saved_opening(file: str | Path) -> PromptPrefix | None:
    """Read the text that a file holds the state of, and whose tokens they are.

    Raises as `load_prompt_cache` does: of a damaged file no model's name is believed, which may be one on the hub.
    """
    with Path(file).open("rb") as f:
        opening = _checked(f, file).get("opening")
    try:
        return _filled(PromptPrefix, opening)
    except TypeError:
        raise ValueError(f"{file}: damaged") from None


def _write(work: Path, path: Path, arrays: dict[str, mx.array], state: dict[str, Any]) -> None:
    try:
        mx.save_safetensors(str(work), arrays, {"mlx_mtp": json.dumps(state), "checksum": BLANK})
    except RuntimeError as e:  # MLX does not name the file
        raise OSError(f"{path}: the prompt cache cannot be written ({first_line(e)})") from e


def _state(cache: PromptCache) -> dict[str, Any]:
    """Collect what of a cache is no array."""
    return {
        "format": FORMAT,
        "tokens": cache.tokens,
        "primed": cache.primed,
        "reach": cache.reach,
        "layers": [c.config for c in cache.layers],
        "heads": [c.config for c in cache.heads],
        "quantizing": cache.quantizing and asdict(cache.quantizing),
        "opening": cache.prefix and asdict(cache.prefix),
        "model": fingerprint(cache.model, heads=False),
        "model_heads": fingerprint(cache.model, heads=True) if cache.heads else None,
        "part": _part(cache.model),
    }


def _own_file(file: str | Path, model: Any) -> Path:
    """Name the file of this rank, where the model is split over ranks."""
    ranks = model.ranks
    return ranks.file(file) if ranks else Path(file)


def _part(model: Any) -> list[int]:
    """Say which rank of how many the model is a part of."""
    ranks = model.ranks
    return [ranks.rank, ranks.size] if ranks else WHOLE


def _restored(model: CachedModel, state: dict[str, Any], arrays: dict[str, mx.array]) -> PromptCache:
    """Rebuild the cache; for a model that was loaded without heads without their state."""
    layers, heads = state["layers"], state["heads"] if model.head_windows() else []
    numbers = [state["primed"], state["reach"]] + [c.get(name) for c in (*layers, *heads) for name in NUMBERS]
    if not all(value is None or (type(value) is int and value >= 0) for value in numbers):
        raise ValueError("a number in it is none")
    caches = from_configs([*layers, *heads])
    for i, c in enumerate(caches):
        names = itertools.takewhile(arrays.__contains__, (f"cache.{i}.{j}" for j in itertools.count()))
        c.parts = tuple(arrays[name] for name in names)
    kept = [arrays[f"kept.{i}"] for i in range(len(no_kept(model, len(heads))))]
    cache = PromptCache(model, caches[: len(layers)], caches[len(layers) :], state["reach"], kept)
    cache.primed = state["primed"]
    cache.backlog = [arrays["backlog"]] if heads and "backlog" in arrays else []
    cache.quantizing = _filled(Quantizing, state["quantizing"])
    cache.prefix = _filled(PromptPrefix, state["opening"])
    cache.settle(state["tokens"])
    return cache


def _filled(kind: type[Any], values: dict[str, Any] | None) -> Any:
    """Make a dataclass of a file's values, or None of none; TypeError where one is not of its field's type."""
    if values is None:
        return None
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if type(value := getattr(made, name)) not in [get_origin(kind) or kind for kind in kinds]:
            raise TypeError(f"{name} is {value!r}")
    return made


def _check(cache: PromptCache) -> None:
    """Raise ValueError for what no cache of this model can be: a checksum is no proof of who made it."""
    model = cache.model
    if not all(type(token) is int and 0 <= token < model.vocab_size for token in cache.tokens):
        raise ValueError("its tokens are not the model's")
    pairs = [*zip(model.windows(), cache.layers, strict=True), *zip(model.head_windows(), cache.heads, strict=False)]
    if len(cache.heads) > len(model.head_windows()) or not all(_suits(window, c) for window, c in pairs):
        raise ValueError("its layers are not the model's")
    if cache.heads and not 0 <= cache.primed <= cache.offset - cache.behind:
        raise ValueError("its heads have read more than it holds")
    for c in cache.caches:
        c.check()


def _suits(needed: CacheKind, c: LayerCache) -> bool:
    """Tell whether a layer that needs this kind of cache can have this one, a window where all positions would do."""
    if isinstance(needed, type):
        return isinstance(c, needed)
    return needed in (None, c.window) and not (c.is_state or c.is_mlx_lm)


def _checked(f: BinaryIO, file: str | Path) -> dict[str, Any]:
    """Read what `_state` wrote, of a file every byte of which is as it was written."""
    state, checksum = _state_in(f, file)
    with contextlib.suppress(ValueError):
        if _checksum(f)[1] == checksum:
            return state
    raise ValueError(f"{file}: damaged, its content does not have its checksum")


def _state_in(f: BinaryIO, file: str | Path) -> tuple[dict[str, Any], str]:
    """Read what the header of a file of this format has of `_state`, and its checksum."""
    try:
        metadata = json.loads(safetensors_header(f))["__metadata__"]
        state = json.loads(metadata["mlx_mtp"])
        version = state.get("format", 1)
        if type(version) is not int:
            raise ValueError(version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file}: not a prompt cache of mlx_mtp, or damaged") from None
    if version != FORMAT:
        age = "an older" if version < FORMAT else "a newer"
        raise ValueError(f"{file}: of {age} format ({version}), this version reads {FORMAT}; make it again")
    return state, metadata.get("checksum", "")


def safetensors_header(f: BinaryIO) -> bytes:
    """Read the JSON text that a safetensors file begins with; ValueError where there is none."""
    f.seek(0)
    length = int.from_bytes(f.read(8), "little")
    if length > os.fstat(f.fileno()).st_size - 8:
        raise ValueError("truncated")
    return f.read(length)


def _checksum(f: BinaryIO) -> tuple[int, str]:
    """Find where a file's checksum is, and what it should be: of all bytes, with zeros in that place."""
    header = safetensors_header(f)
    match = CHECKSUM.search(header)
    if match is None:
        raise ValueError("no checksum")
    f.seek(0)
    digest = hashlib.blake2b(f.read(8), digest_size=DIGITS // 2)
    digest.update(header[: match.start(1)] + BLANK.encode() + header[match.end(1) :])
    f.seek(8 + len(header))
    while piece := f.read(PIECE):
        digest.update(piece)
    return 8 + match.start(1), digest.hexdigest()


SAMPLED = 256  # values of each tensor: another finetune changes some of nearly every one


def fingerprint(model: Any, *, heads: bool) -> str:
    """Digest a model's configuration and of its parameters' names, shapes, types and a sample of their values.

    So a saved cache is known to be this model's. heads: of its drafter or its draft heads, without their LM heads, on
    which no state depends; else of the target. Of a model that is split all ranks have the same one, and have to ask
    for it together.
    """
    arrays: Any = tree_flatten(model.parameters())
    other = re.compile(r"mtp\.\d+\.(head\.|d2t$)|(?!(mtp|drafter)\.)" if heads else r"(mtp|drafter)\.")
    own = sorted((name, array) for name, array in arrays if not other.match(name))
    facts: list[Any] = [f"{name} {array.shape} {array.dtype}" for name, array in own]
    if heads:
        facts.append(str(getattr(model, "spec", None)))
    elif is_dataclass(args := getattr(model, "args", None)):
        facts.append(asdict(args))  # type: ignore[arg-type] - no class, but one of its values
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    if own:
        digest.update(np.array(mx.concatenate([_sample(array) for _, array in own])).tobytes())
    ranks = model.ranks
    return ranks.combined(digest.hexdigest()) if ranks else digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """Take the bytes [n] of up to SAMPLED values, spread evenly over an array."""
    flat = array.reshape(-1)
    return mx.view(mx.contiguous(flat[:: -(-flat.size // SAMPLED) or 1]), mx.uint8)
