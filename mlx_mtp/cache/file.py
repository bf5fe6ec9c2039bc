"""Save a prompt cache in a file and load it: the state of target and heads, a fingerprint of the model."""

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
from ..pictures.rows import places_in
from .drafting import no_kept
from .kinds import from_configs
from .layer_cache import CachedModel, CacheKind, LayerCache
from .mark import Quantizing
from .prompt_cache import PromptCache
from .prompt_prefix import PromptPrefix

LANE_FORMAT = 4  # of a file whose rows are not of the lane "exact", which earlier versions assume
FORMAT = 3  # of another file with pictures
TEXT_FORMAT = 2  # of a file without both, which earlier versions read too
WHOLE = [0, 1]  # the part of a model that is not split
DIGITS = 64
BLANK = "0" * DIGITS  # stands for the checksum while it is computed
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
NUMBERS = ("start", "keep", "bits", "group_size", "offset", "count")  # fields of layers' configs
PIECE = 1 << 24  # bytes per read


@in_turn()
def save_prompt_cache(file: str | Path, cache: PromptCache) -> None:
    """Write a cache, between generations, to a safetensors file, with its MTP heads and their pending rows.

    If the model is split over ranks, each rank writes its part: rank 0 to `file`, rank 1 to `file`.rank1 and so on.
    The file is replaced at once, never half written. Raises ValueError if `file` is a directory or device, OSError if
    it cannot be written or the disk is too full.
    """
    path = _own_file(file, cache.model)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file; name another file for the prompt cache")
    arrays = {f"cache.{i}.{j}": part for i, c in enumerate(cache.caches) for j, part in enumerate(c.used())}
    arrays |= {f"kept.{i}": row for i, row in enumerate(cache.kept)}
    if cache.backlog:
        arrays["backlog"] = mx.concatenate(cache.backlog, axis=1)
    if shutil.disk_usage(path.absolute().parent).free < sum(array.nbytes for array in arrays.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))  # MLX's error has no reason
    adapters = cache.model.runtime.adapters
    with adapters.using(adapters.selected if cache.adapter is None else adapters.name_of(cache.adapter)):
        state = _state(cache)
    work = path.with_name(f".{path.name}-{uuid.uuid4().hex}.safetensors")
    try:
        try:
            mx.save_safetensors(str(work), arrays, {"mlx_mtp": json.dumps(state), "checksum": BLANK})
        except RuntimeError as e:  # its message does not name the file
            raise OSError(f"{path}: the prompt cache cannot be written ({first_line(e)})") from e
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
def read_prompt_cache(file: str | Path, model: CachedModel, *, check_memory: bool = True) -> tuple[PromptCache, bool]:
    """Return the cache that `save_prompt_cache` wrote to a file, and whether its rows are of the model's lane.

    If they are not, of a split model on any rank, the arrays must not be used: they are not read. The heads' part is
    left out if `model` has no heads. Of a split model each rank reads its own file. Raises ValueError with the reason
    if the file is not a prompt cache, is damaged, has another format version, belongs to another model, vision tower,
    rank or other heads, has pictures and rows of another lane, or (unless check_memory is False) if memory is too
    small; OSError if it cannot be read.
    """
    file = _own_file(file, model)
    with file.open("rb") as f:  # the same file from here on, even if another process replaces it
        state = _checked(f, file)
        if maker := _other_maker(state, model):
            raise ValueError(f"{file}: made {maker}")
        fits = _in_lane(state, model)
        check_room(f"{file}:", os.fstat(f.fileno()).st_size, ignore=not check_memory)
        f.seek(0)
        try:
            loaded: Any = mx.load(f, format="safetensors")
            cache = _restored(model, state, loaded)
            _check(cache)
            if fits:
                mx.eval(cache.arrays)
        except RuntimeError as e:  # of MLX; its message is its JSON library's
            raise ValueError(f"{file}: damaged (its arrays cannot be read); make it again") from e
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, AssertionError) as e:
            raise ValueError(f"{file}: damaged ({first_line(e)}); make it again") from e
    return cache, fits


def _in_lane(state: dict[str, Any], model: Any) -> bool:
    """Return whether a file with these values of `_state` has rows of the model's lane, on ranks whether all have."""
    fits = model.runtime.fits(state.get("lane", "exact"))
    return all(model.ranks.gather_values(fits)) if model.ranks else fits


def _other_maker(state: dict[str, Any], model: Any) -> str | None:
    """Return what a file with these values of `_state` was made with, if not with `model`, and what to do."""
    if (part := state.get("part", WHOLE)) != (own := _part(model)):
        return f"on rank {part[0]} of {part[1]}; expected {own[0]} of {own[1]}; make it again"
    if state.get("model") != fingerprint(model, heads=False):
        return "with another model, adapter or precision; load that one, or make it again"
    if model.head_windows() and state.get("heads") and state.get("model_heads") != fingerprint(model, heads=True):
        return "with other MTP heads or another drafter; load those, or make it again"
    if state.get("pictures") and (model.vision is None or state.get("vision") != model.vision.fingerprint):
        lacking = "whose vision tower or settings this model does not have"
        return f"with pictures, {lacking}; load it with those, or make the file again"
    if state.get("pictures") and not model.runtime.fits(lane := state.get("lane", "exact")):
        again = f"load the model with kernels={lane.partition(' ')[0]!r}, or make the file again"
        key = model.runtime.lane_key
        return f"with pictures, which it does not contain, in the lane {lane!r} and not {key!r}; {again}"
    return None


def saved_prefix(file: str | Path) -> PromptPrefix | None:
    """Return the prompt prefix stored in a prompt cache's file, None if it has none; no model is needed.

    On every rank `file` itself is read, not the rank's own part.

    Raises ValueError if the file is not a prompt cache, is damaged or has another format version; OSError if it
    cannot be read.
    """
    with Path(file).open("rb") as f:
        opening = _checked(f, file).get("opening")  # checked first: it may name a model to download
    try:
        return _filled(PromptPrefix, opening)
    except (TypeError, ValueError):
        raise ValueError(f"{file}: damaged (its prompt prefix is not valid); make it again") from None


def _state(cache: PromptCache) -> dict[str, Any]:
    """Return what the file of a cache, between generations, stores besides its arrays, as JSON values."""
    lane = cache.model.runtime.lane_key
    return {
        "format": LANE_FORMAT if lane != "exact" else FORMAT if cache.places else TEXT_FORMAT,
        "lane": lane,
        "tokens": cache.tokens,
        **(_pictures(cache) if cache.places else {}),
        "primed": cache.primed,
        "reach": cache.reach,
        "layers": [c.config for c in cache.layers],
        "heads": [c.config for c in cache.heads],
        "quantizing": cache.quantizing and asdict(cache.quantizing),
        "quantized": cache.quantized and asdict(cache.quantized),
        "opening": cache.prefix and asdict(cache.prefix),
        "model": fingerprint(cache.model, heads=False),
        "model_heads": fingerprint(cache.model, heads=True) if cache.heads else None,
        "part": _part(cache.model),
    }


def _pictures(cache: PromptCache) -> dict[str, Any]:
    """Return {"pictures": [first row, height, width] of each picture, "vision": the vision tower's fingerprint}.

    The first row is an index among the cache's tokens; height and width are in rows of the prompt.
    """
    return {"pictures": [list(place[:3]) for place in cache.places], "vision": cache.model.vision.fingerprint}


def _own_file(file: str | Path, model: Any) -> Path:
    """Return this rank's file if the model is split over ranks, else `file`."""
    return model.ranks.file(file) if model.ranks else Path(file)


def _part(model: Any) -> list[int]:
    """Return a list of this process's rank and the number of ranks of the model; WHOLE if it is not split."""
    return [model.ranks.rank, model.ranks.size] if model.ranks else WHOLE


def _restored(model: CachedModel, state: dict[str, Any], arrays: dict[str, mx.array]) -> PromptCache:
    """Return the cache made of a file's values, without heads if the model has none.

    ValueError if a position or size is not an integer of at least 0; other bad values raise other errors.
    """
    layers, heads = state["layers"], state["heads"] if model.head_windows() else []
    numbers = [state["primed"], state["reach"]] + [c.get(name) for c in (*layers, *heads) for name in NUMBERS]
    if not all(value is None or (type(value) is int and value >= 0) for value in numbers):
        raise ValueError("one of its positions or sizes is not an integer of at least 0")
    caches = from_configs([*layers, *heads])
    for i, c in enumerate(caches):
        names = itertools.takewhile(arrays.__contains__, (f"cache.{i}.{j}" for j in itertools.count()))
        c.parts = tuple(arrays[name] for name in names)
    kept = [arrays[f"kept.{i}"] for i in range(len(no_kept(model, len(heads))))]
    cache = PromptCache(model, caches[: len(layers)], caches[len(layers) :], state["reach"], kept)
    cache.primed = state["primed"]
    cache.backlog = [arrays["backlog"]] if heads and "backlog" in arrays else []
    cache.quantizing = _filled(Quantizing, state["quantizing"])
    cache.quantized = _filled(Quantizing, state.get("quantized"))
    cache.prefix, cache.adapter = _filled(PromptPrefix, state["opening"]), model.runtime.adapters.fingerprint
    _check_tokens(state["tokens"], state.get("pictures", []), model.vocab_size)
    cache.settle(state["tokens"])
    return cache


def _check_tokens(tokens: list[int], pictures: list[list[int]], vocab_size: int) -> None:
    """Raise ValueError unless each token is a token id or a row of a picture, and the pictures equal `pictures`.

    pictures: [first row, height, width] of each picture, by first row; if empty, no token may be negative.
    """
    least = -(2**63) if pictures else 0
    if not all(type(token) is int and least <= token < vocab_size for token in tokens):
        raise ValueError("its tokens are not the model's")
    if [list(place[:3]) for place in places_in(tokens)] != pictures:
        raise ValueError("its list of pictures does not match its tokens")


def _filled(kind: type[Any], values: dict[str, Any] | None) -> Any:
    """Return a dataclass of a file's values, None for None; TypeError if a value does not have its field's type."""
    if values is None:
        return None
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if type(value := getattr(made, name)) not in [get_origin(kind) or kind for kind in kinds]:
            raise TypeError(f"{name} is {value!r}")
    return made


def _check(cache: PromptCache) -> None:
    """Raise ValueError if caches are not of the model's kinds, or positions or arrays do not fit the tokens held.

    Needed also where the checksum is right: it does not prove who wrote the file.
    """
    model = cache.model
    pairs = [*zip(model.windows(), cache.layers, strict=True), *zip(model.head_windows(), cache.heads, strict=False)]
    if len(cache.heads) > len(model.head_windows()) or not all(_suits(window, c) for window, c in pairs):
        raise ValueError("its layers are not the model's")
    if cache.heads and not 0 <= cache.primed <= cache.offset - cache.pending_rows:
        raise ValueError("its heads have read more than it holds")
    for c in cache.caches:
        c.check()


def _suits(needed: CacheKind, c: LayerCache) -> bool:
    """Return whether a layer that needs this kind can use the cache.

    Where all positions are needed, a window is accepted too (max_kv_size).
    """
    if callable(needed):
        own = needed()
        return type(c) is type(own) and c.empty_config == own.empty_config
    return needed in (None, c.window) and not (c.is_state or c.is_mlx_lm)


def _checked(f: BinaryIO, file: str | Path) -> dict[str, Any]:
    """Return the values of `_state` in an open file; ValueError as `_state_in`, or if any byte has changed."""
    state, checksum = _state_in(f, file)
    with contextlib.suppress(ValueError):
        if _checksum(f)[1] == checksum:
            return state
    raise ValueError(f"{file}: damaged, its content does not match its checksum; make it again")


def _state_in(f: BinaryIO, file: str | Path) -> tuple[dict[str, Any], str]:
    """Return the values of `_state` and the checksum, both from a file's header and not yet checked.

    Raises ValueError if the file is no prompt cache or has another format version.
    """
    try:
        metadata = json.loads(safetensors_header(f))["__metadata__"]
        state = json.loads(metadata["mlx_mtp"])
        version = state.get("format", 1)
        if type(version) is not int:
            raise ValueError(version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file}: not a prompt cache of mlx_mtp, or damaged; make it again") from None
    if not TEXT_FORMAT <= version <= LANE_FORMAT:
        age = "an older" if version < TEXT_FORMAT else "a newer"
        reads = f"{TEXT_FORMAT} to {LANE_FORMAT}"
        raise ValueError(f"{file}: of {age} format ({version}), this version reads {reads}; make it again")
    return state, metadata.get("checksum", "")


def safetensors_header(f: BinaryIO) -> bytes:
    """Return the JSON bytes at the start of a safetensors file; ValueError if the file is too short for them."""
    f.seek(0)
    length = int.from_bytes(f.read(8), "little")
    if length > os.fstat(f.fileno()).st_size - 8:
        raise ValueError("truncated")
    return f.read(length)


def _checksum(f: BinaryIO) -> tuple[int, str]:
    """Return the byte position of the checksum in a file, and the checksum computed from the file's content.

    The computed one covers all bytes of the file, with zeros instead of the stored checksum, which is not compared.
    ValueError if the file has no checksum.
    """
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


SAMPLED = 256  # values of each tensor; another finetune changes some of them in nearly every tensor


def fingerprint(model: Any, *, heads: bool) -> str:
    """Return a hash that identifies the model, or its heads, to which a saved cache belongs.

    heads=False: a hash of the target's parameters, of `model.args` if it is a dataclass, and of the whole content of
    the selected adapter. heads=True: of `model.spec`, and of the parameters of the drafter or MTP heads, except the
    MTP heads' own LM heads and d2t, on which no state depends. Of parameters it covers the names, shapes, types, and
    up to SAMPLED values of each. All ranks of a split model must call this together; all return the same hash.
    """
    arrays: Any = tree_flatten(model.parameters())
    other = re.compile(r"mtp\.\d+\.(head\.|d2t$)|(?!(mtp|drafter)\.)" if heads else r"(mtp|drafter)\.")
    chosen = sorted((name, array) for name, array in arrays if not other.match(name))
    facts: list[Any] = [f"{name} {array.shape} {array.dtype}" for name, array in chosen]
    if heads:
        facts.append(str(getattr(model, "spec", None)))
    elif is_dataclass(args := getattr(model, "args", None)):
        facts.append(asdict(args))  # type: ignore[arg-type] - an instance, not a class
    if not heads and (adapter := model.runtime.adapters.fingerprint):
        facts.append(adapter)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    if chosen:
        digest.update(np.array(mx.concatenate([_sample(array) for _, array in chosen])).tobytes())
    return model.ranks.combined(digest.hexdigest()) if model.ranks else digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """Return the bytes, uint8 [n], of up to SAMPLED values spaced evenly over an array."""
    flat = array.reshape(-1)
    return mx.view(mx.contiguous(flat[:: -(-flat.size // SAMPLED) or 1]), mx.uint8)
