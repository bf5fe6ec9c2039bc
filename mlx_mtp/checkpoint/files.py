"""Find or download a checkpoint; read its config.json, its safetensors headers and its tensors as lazy arrays."""

import contextlib
import glob
import json
import math
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from mlx_lm import utils as mlx_lm_utils
from safetensors import SafetensorError, safe_open

from ..demo import NAMED
from ..machine.errors import first_line, naming, one_line
from ..machine.paths import expanded
from ..machine.progress import report_progress
from ..models.config.normalize import normalize, with_overrides
from .file_sizes import check_count, check_header, check_size, check_sizes
from .library import called, places
from .weight_names import (
    INDEX,
    INDEXES,
    SIDECAR_FILES,
    TRUNK_FILES,
    VISION_FILE,
    is_sidecar,
    read_index,
    weight_names,
)

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.tiktoken")
DOWNLOADED = (*SMALL_FILES, TRUNK_FILES, *SIDECAR_FILES, VISION_FILE)
CODE = "*.py"  # for example a tokenizer's
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # config keys of the number of layers
DECLARED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # and of the number of heads
MAX_LAYERS = 1024  # every layer is built before the tensors are checked
MAX_KEYS = 2000  # of config.json and its text_config
MAX_ENDS = 1000  # ids of end-of-text tokens: each is looked up in the vocabulary
FLOATS = ("BF16", "F16", "F32", "F64")
FP8_SCALES = ("_scale_inv", "_scale")  # suffixes to a weight's name: scales per block, and per row or tensor
FP8_BLOCK = 128
CONVERTED = {"format": "mlx", "norms": "converted"}  # metadata of files that `mlx-mtp convert` writes
SMALL = ("config.json", "generation_config.json", "hf_quant_config.json", INDEX, INDEXES)
TRANSPORTS = ("httpx", "httpx2", "requests")  # modules of connection errors; huggingface_hub's version decides
CONCURRENT_FETCHES = 8
SHORT = re.compile(r"[\w.-]+")  # a name without a folder
SMOLLM2, SMOLLM2_REPO = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"  # its short name; its hub repository


@dataclass(frozen=True)
class Tensor:
    """One tensor's entry in a safetensors header.

    format: the file's metadata entry "format" ("pt", "mlx"), or None. converted: whether the file's metadata states
    that `mlx-mtp convert` wrote it, so that no norm needs +1. stored: the tensor's name in the file if it is read
    under another name.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str  # "BF16", "F8_E4M3", ...
    format: str | None
    converted: bool
    stored: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file; "BOOL", whose name contains no number of bits, has one byte per value."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


Header = dict[str, Tensor]


def stored_types(header: Header) -> dict[str, int]:
    """Return the bytes in the files by stored type, the largest first."""
    found: Counter[str] = Counter()
    for tensor in header.values():
        found[tensor.dtype] += tensor.nbytes
    return dict(found.most_common())


def resolve(
    path_or_repo: str | Path, revision: str | None = None, *, files: Collection[str] | None = None, code: bool = False
) -> Path:
    """Return the path that `local` returns or, if that is None, the directory of a download from the hub.

    files: patterns of the files to download; None is every file that a load reads. code: also download Python files.
    All options are ignored for a local path. ValueError, one line, if the path is unusable (`local`) or the download
    fails; unusually named weight files may be missing without an error.
    """
    if path := local(path_or_repo):
        return path
    patterns = [*(DOWNLOADED if files is None else files), *([CODE] if code else [])]
    try:
        path = Path(snapshot_download(str(path_or_repo), revision=revision, allow_patterns=patterns))
    except Exception as e:
        raise ValueError(not_fetched(path_or_repo, e, "not on the hub")) from e
    if files is None and (more := _other_weights(str(path_or_repo), revision, path)):
        with contextlib.suppress(Exception):  # the loader names a needed file that is missing
            path = Path(snapshot_download(str(path_or_repo), revision=revision, allow_patterns=more))
    check_sizes(path)
    return path


def _other_weights(repo: str, revision: str | None, path: Path) -> list[str]:
    """Return patterns, one per file, of weight files with unusual names that are not in the directory `path` yet.

    The names are from the index or, if it and the directory have sidecars only, from the list of files on the hub.
    """
    listed = set(read_index(path).values())
    names = listed | {file.relative_to(path).as_posix() for file in path.glob("**/*.safetensors")}
    with contextlib.suppress(Exception):  # offline
        if not any(not is_sidecar(name) for name in weight_names(names, listed)):
            names |= set(HfApi().list_repo_files(repo, revision=revision))
    return [glob.escape(name) for name in weight_names(names, listed) if not (path / name).exists()]


def not_fetched(name: str | Path, e: Exception, otherwise: str) -> str:
    """Return a message with the cause of a failed download: the connection, the disk, or else `otherwise`.

    For a name without a folder the message ends with the most similar short name, or the command that lists them.
    """
    return _cause(name, e, otherwise) + (_similar(str(name)) if SHORT.fullmatch(str(name)) else "")


def _similar(name: str) -> str:
    known = [*NAMED, SMOLLM2, *(place.short for place in places())]
    found = get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {found[0]}?" if found else "; `mlx-mtp models` lists the short names"


def _cause(name: str | Path, e: Exception, otherwise: str) -> str:
    cause = e.__cause__ if isinstance(e, LocalEntryNotFoundError) and isinstance(e.__cause__, Exception) else e
    why, copy = first_line(cause), "no whole copy in the download cache"
    if isinstance(cause, OfflineModeIsEnabled):
        return f"{name}: no such directory, {copy}, and offline: unset HF_HUB_OFFLINE to download it"
    if cause is not e or type(cause).__module__.partition(".")[0] in TRANSPORTS:
        state = "the hub fails" if isinstance(cause, HfHubHTTPError) else "offline"
        return f"{name}: no such directory, {copy}, and {state} ({why}): connect and try again"
    if isinstance(e, HFValidationError):
        return f"{name}: no such directory, and not a name on the hub, as in zai-org/GLM-4.7-Flash"
    if isinstance(e, OSError) and not isinstance(e, HfHubHTTPError):
        return f"{name}: no such directory, and it cannot be downloaded: {why}"
    return f"{name}: no such directory, and {otherwise}: {why}"


def local(path_or_repo: str | Path) -> Path | None:
    """Return this directory, with "~" expanded, else the directory or GGUF file with this short name, else None.

    Short names are those of NAMED, and of the models on this machine, as `called` finds them.

    ValueError if the path is a file, cannot be read, or directly contains a pipe, socket, device or a file that is
    too large, or if several models have the short name.
    """
    try:
        path = expanded(path_or_repo)
        if path.is_dir():
            check_sizes(path)
            return path
        if path.exists():
            raise ValueError(f"{path}: not a directory; a checkpoint is a directory with config.json")
    except (OSError, RuntimeError) as e:
        raise ValueError(f"{path_or_repo}: cannot be read ({e})") from None
    name = str(path_or_repo)
    return NAMED.get(name) or (called(name) if SHORT.fullmatch(name) else None)


def read_config(path: Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return config.json with normalised keys and generation_config.json's stop tokens.

    overrides: values that replace the file's. ValueError for a missing or damaged file, and as `checked_config`.
    """
    for name in ("config.json", "generation_config.json"):
        check_size(path / name)
    try:
        config = mlx_lm_utils.load_config(path)
    except FileNotFoundError:
        if file := next(iter(sorted(path.glob("*.gguf"))), None):
            raise ValueError(f"{path}: a directory with a GGUF file; name the file itself: {file}") from None
        raise ValueError(f"{path}/config.json: not found; not a checkpoint directory") from None
    except OSError as e:
        raise ValueError(f"{path}/config.json: cannot be read ({e.strerror})") from None
    except (TypeError, AttributeError):  # mlx-lm merges generation_config.json into config.json unchecked
        raise ValueError(f"{path}: config.json and generation_config.json must be JSON objects") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}/config.json: not valid JSON ({e})") from None
    return checked_config(config, path / "config.json", overrides)


def checked_config(config: Any, file: Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a config.json with normalised keys, after `overrides` have replaced values of it.

    ValueError, with the file's name, unless it is an object with a model_type, text_config and quantization_config
    are objects, null or absent, and the numbers of layers and MTP heads are null, absent, or integers in range.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{file}: expected an object with a model_type")
    config = with_overrides(config, overrides or {})
    if config.get("text_config", {}) is None:
        del config["text_config"]
    if not isinstance(config.get("text_config", {}), dict):
        raise ValueError(f"{file}: text_config is {config['text_config']!r}, expected an object")
    text = config | config.get("text_config", {})
    if len(text) > MAX_KEYS:
        raise ValueError(f"{file}: {len(text):,} keys; allowed are {MAX_KEYS:,}")
    if isinstance(ends := text.get("eos_token_id"), list) and len(ends) > MAX_ENDS:
        raise ValueError(f"{file}: eos_token_id has {len(ends):,} ids; allowed are {MAX_ENDS:,}")
    if not isinstance(stored := text.get("quantization_config"), dict | None):
        raise ValueError(f"{file}: quantization_config is {stored!r}, expected an object")
    for name in (*DECLARED, *LAYERS):
        count, least = text.get(name), int(name in LAYERS)
        if count is not None and type(count) is not int:
            raise ValueError(f"{file}: {name} is {count!r}, expected an integer")
        if count is not None and (count > MAX_LAYERS or count < least == 1):
            raise ValueError(f"{file}: {name} is {count}; allowed are {least} to {MAX_LAYERS}")
    return normalize(config).config


def read_header(files: Iterable[Path]) -> Header:
    """Return the header entries of the tensors in safetensors files, by name; no data is read.

    Of tensors with the same name the last file's remains. ValueError names a missing, truncated or damaged file.
    """
    header: Header = {}
    count = 0
    for file in files:
        if not file.is_file():  # opening a pipe would block
            raise ValueError(f"{file}: not a file")
        if not os.access(file, os.R_OK):
            raise ValueError(f"{file}: cannot be read (permission denied)")
        with one_line(f"{file}: truncated or damaged", (SafetensorError, OSError)):
            check_header(file)
            f = safe_open(file, "numpy")
        with f:
            metadata, names = f.metadata() or {}, f.keys()
            check_count(count := count + len(metadata) + len(names), file)
            of_file = metadata.get("format"), metadata.get("norms") == CONVERTED["norms"]
            for name in names:
                entry = f.get_slice(name)
                header[name] = Tensor(file, tuple(entry.get_shape()), entry.get_dtype(), *of_file)
    return header


def fill_model(path: Path, config: dict[str, Any], make: Callable[[Any], Any], args: Any) -> Any:
    """Return the model `make(args)`, with lazy weights, as mlx-lm's `load_model` fills and quantizes it.

    `make` has to return a model whose instance attribute `sanitize` reads the tensors, with another `load_weights`;
    both are deleted afterwards. mlx-lm gets a directory without weight files, because it would open every file there,
    unneeded and damaged ones too.
    """
    classes = make, SimpleNamespace(from_dict=lambda merged: args)
    options: Any = {"model_config": config, "get_model_classes": lambda config: classes}
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as name:
        (Path(name) / "config.json").write_text("{}")  # `model_config` overrides it
        if (quantization := path / "hf_quant_config.json").is_file():
            (Path(name) / quantization.name).write_bytes(quantization.read_bytes())
        model, _ = mlx_lm_utils.load_model(Path(name), lazy=True, strict=False, **options)
    del model.sanitize, model.load_weights  # later calls, as for adapters, do not load a checkpoint
    return model


def read_bytes(tensor: Tensor, begin: int, size: int) -> Iterator[bytes]:
    """Yield a tensor's data, which begins at offset `begin` of its file, in pieces of at most `size` bytes.

    ValueError if the file is truncated.
    """
    left = tensor.nbytes
    with tensor.file.open("rb") as f:
        f.seek(begin)
        while left:
            piece = f.read(min(size, left))
            if not piece:
                raise ValueError(f"{tensor.file}: truncated or damaged")
            left -= len(piece)
            yield piece


def data_begins(file: Path) -> dict[str, int]:
    """Return the offset in a safetensors file at which each tensor's data begins, by name; damage is not detected."""
    with file.open("rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def read_tensors(header: Header) -> dict[str, mx.array]:
    """Return the header's tensors as lazy arrays, by the header's names; MLX's RuntimeError for a damaged file."""
    loaded: Any = {file: mx.load(str(file)) for file in {tensor.file for tensor in header.values()}}
    return {name: loaded[tensor.file][tensor.stored or name] for name, tensor in header.items()}


def dequantized(weights: dict[str, mx.array], header: Header) -> dict[str, mx.array]:
    """Return the weights with 8-bit floats dequantized to bfloat16, without their scales; lazy.

    Other weights, and 8-bit floats without a scale, are unchanged. 8-bit floats are uint8 [rows, columns] with a
    scale per tensor, per row, or per FP8_BLOCK x FP8_BLOCK block. ValueError for scales of another shape.
    """
    plain = dict(weights)
    for name, weight in weights.items():
        suffix = next((s for s in FP8_SCALES if name + s in weights), None)
        if suffix is None or weight.dtype != mx.uint8:
            continue
        scale = plain.pop(name + suffix)
        rows, columns = weight.shape[0], weight.shape[-1]
        blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        if scale.shape == blocks:
            scale = mx.repeat(mx.repeat(scale, FP8_BLOCK, 0)[:rows], FP8_BLOCK, 1)[:, :columns]
        elif scale.size not in (1, rows):
            shapes = f"one scale, {rows} for the rows, or {blocks} for blocks of {FP8_BLOCK}"
            found = f"tensor {name}{suffix} has shape {scale.shape}"
            raise ValueError(f"{header[name].file}: {found}; expected {shapes}")
        else:
            scale = scale.reshape(-1, 1)
        plain[name] = (mx.from_fp8(weight, dtype=mx.bfloat16) * scale).astype(mx.bfloat16)
    return plain


@contextlib.contextmanager
def headers_only(repo: str, revision: str | None = None) -> Iterator[Path]:
    """Yield a temporary directory with a hub checkpoint's files of SMALL and the headers of its weight files.

    Weight files are sparse: instead of data they have holes. Raises a one-line ValueError if this cannot be fetched
    or written, for any reason. The directory is deleted when the block ends.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as name:
        try:
            _fetch(HfApi(), repo, revision, Path(name))
        except Exception as e:
            raise ValueError(not_fetched(repo, e, "no headers from the hub")) from e
        yield Path(name)


def downloaded(repo: str, revision: str | None = None) -> Path | None:
    """Return the directory of a hub repository in the download cache; None without a weight file at its top level.

    The copy may be incomplete. Nothing is downloaded, and nothing raises.
    """
    with contextlib.suppress(Exception):  # no such name, no cache, no copy, ...
        path = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        return path if weight_names(file.name for file in path.glob("*.safetensors")) else None
    return None


def _fetch(api: HfApi, repo: str, revision: str | None, path: Path) -> None:
    """Write a repository's files of SMALL, and the headers of its weight files, into the directory `path`."""
    info = api.model_info(repo, revision=revision)
    names = [file.rfilename for file in info.siblings or []]
    for name in names:
        if "/" not in name and any(fnmatch(name, pattern) for pattern in SMALL):
            cached = api.hf_hub_download(repo, name, revision=info.sha)
            with naming(path / name):
                (path / name).write_bytes(Path(cached).read_bytes())
    files = weight_names(names, {*read_index(path).values(), VISION_FILE})
    with ThreadPoolExecutor(CONCURRENT_FETCHES) as pool:
        for done, _ in enumerate(pool.map(lambda name: _write(api, repo, info.sha, path, name), files), 1):
            report_progress("Reading headers of weight files", done, len(files))


def _write(api: HfApi, repo: str, revision: str | None, path: Path, name: str) -> None:
    """Write a weight file's header, fetched from the hub, and leave its data as a hole of the same size."""
    file = path / name
    found = api.parse_safetensors_file_metadata(repo, name, revision=revision)
    header: dict = {"__metadata__": {key: str(value) for key, value in found.metadata.items()}}
    for tensor, entry in found.tensors.items():
        header[tensor] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": entry.data_offsets}
    text = json.dumps(header).encode()
    end = max((entry.data_offsets[1] for entry in found.tensors.values()), default=0)
    file.parent.mkdir(parents=True, exist_ok=True)
    with naming(file), file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
