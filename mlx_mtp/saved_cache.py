"""Prompt caches as files: target's and heads' state, whose it is, and a checksum of every byte."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from .cache import make_saved
from .fingerprint import fingerprint
from .opening import Opening
from .prompt_cache import PromptCache, Quantizing

FORMAT = 2
DIGITS = 64
BLANK = "0" * DIGITS  # where the checksum is to be, while it is taken
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
PIECE = 1 << 24  # bytes read at a time


def save_prompt_cache(file: str | Path, cache: PromptCache) -> None:
    """Write a cache that is at rest, heads and their pending rows included, in the safetensors format.

    A reader finds the old file or the whole new one. Raises ValueError for what is no file, OSError or RuntimeError
    where it cannot be written.
    """
    path = Path(file)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a file, a prompt cache cannot take its place")
    arrays = {f"cache.{i}.{j}": part for i, c in enumerate(cache.caches) for j, part in enumerate(c.used())}
    arrays |= {f"kept.{i}": row for i, row in enumerate(cache.kept)}
    if cache.backlog:
        arrays["backlog"] = mx.concatenate(cache.backlog, axis=1)
    work = path.with_name(f".{path.name}-{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(work), arrays, {"mlx_mtp": json.dumps(_state(cache)), "checksum": BLANK})
        with work.open("r+b") as f:
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


def load_prompt_cache(file: str | Path, model: Any) -> PromptCache:
    """Read a cache that `save_prompt_cache` wrote.

    Raises ValueError, with the reason, where it is not one, is damaged, of an older format or another model's.
    """
    state = _checked(Path(file))
    try:
        loaded: Any = mx.load(str(file), format="safetensors")
        return _restored(file, model, state, loaded)
    except (RuntimeError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise ValueError(f"{file}: damaged ({type(e).__name__})") from e


def _state(cache: PromptCache) -> dict[str, Any]:
    """What of a cache is no array."""
    return {
        "format": FORMAT,
        "tokens": cache.tokens,
        "primed": cache.primed,
        "reach": cache.reach,
        "layers": [c.config for c in cache.layers],
        "heads": [c.config for c in cache.heads],
        "quantizing": cache.quantizing and asdict(cache.quantizing),
        "opening": cache.opening and asdict(cache.opening),
        "model": fingerprint(cache.model, heads=False),
        "model_heads": fingerprint(cache.model, heads=True) if cache.heads else None,
    }


def _restored(file: str | Path, model: Any, state: dict[str, Any], arrays: dict[str, mx.array]) -> PromptCache:
    """The cache, for a model that it was made with; one without heads leaves out their state."""
    if state["model"] != fingerprint(model, heads=False):
        raise ValueError(f"{file}: made with another model, or in another precision")
    heads = state["heads"] if model.mtp else []
    if heads and state["model_heads"] != fingerprint(model, heads=True):
        raise ValueError(f"{file}: made with other MTP heads")
    layers = len(state["layers"])
    caches = make_saved([*state["layers"], *heads])
    for i, c in enumerate(caches):
        names = itertools.takewhile(arrays.__contains__, (f"cache.{i}.{j}" for j in itertools.count()))
        c.parts = tuple(arrays[name] for name in names)
    kept = [arrays[f"kept.{i}"] for i in range(max(0, len(heads) - 1))]
    cache = PromptCache(model, caches[:layers], caches[layers:], state["reach"], kept)
    cache.primed = state["primed"]
    cache.backlog = [arrays["backlog"]] if heads and "backlog" in arrays else []
    cache.quantizing = state["quantizing"] and Quantizing(**state["quantizing"])
    cache.opening = state["opening"] and Opening(**state["opening"])
    cache.settle(state["tokens"])
    mx.eval(cache.arrays)  # the file may be replaced from now on
    return cache


def _checked(file: Path) -> dict[str, Any]:
    """What `_state` wrote, of a file every byte of which is as it was written."""
    try:
        with file.open("rb") as f:
            header = json.loads(_header(f))
            metadata = header["__metadata__"]
            state = json.loads(metadata["mlx_mtp"])
            version = state.get("format", 1)
            found = _checksum(f)[1] if "checksum" in metadata else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file}: not a prompt cache of mlx_mtp, or damaged") from None
    if version != FORMAT:
        age = "an older" if version < FORMAT else "a newer"
        raise ValueError(f"{file}: of {age} format ({version}), this version reads {FORMAT}; make it again")
    if found != metadata.get("checksum"):
        raise ValueError(f"{file}: damaged, its content does not have its checksum")
    return state


def _header(f: BinaryIO) -> bytes:
    """A safetensors file's header; ValueError where there is none."""
    f.seek(0)
    start = f.read(8)
    size = os.fstat(f.fileno()).st_size
    if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > size - 8:
        raise ValueError("truncated")
    return f.read(length)


def _checksum(f: BinaryIO) -> tuple[int, str]:
    """Where a file's checksum is, and what it should be: of all bytes, with zeros in that place."""
    header = _header(f)
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
