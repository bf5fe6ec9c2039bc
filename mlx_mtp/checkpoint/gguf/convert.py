"""Transcode a GGUF file into an MLX checkpoint with its MTP heads, config.json and tokenizer."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import save_config

from ...machine import atomic
from ...machine.paths import expanded
from ...models import find_port
from .. import convert_writer as writer
from ..build import read_port
from ..files import SMALL_FILES, resolve
from ..sort_tensors import Drafting
from ..weight_names import INDEX
from . import write as writing
from .plan import FormatRow, GGUFOptions, GGUFParameter, activations, listed_quantization, make_plan, summarize
from .source import GGUFSource, open_source
from .tokenizer import TokenizerFiles, make_tokenizer

SIDECAR = "mtp.safetensors"
NOT_COPIED = ("config.json", INDEX)


@dataclass(frozen=True)
class Prepared:
    """A planned transcoding, before any file is written.

    rows: one for each GGUF type and format of matrices. files: tensors to write, by file and name. config: the
    content of config.json. tokenizer: None if it is not made from the metadata. copied: small files to copy from
    another checkpoint. measured: whether the errors in `rows` were measured.
    """

    source: GGUFSource
    parameters: list[GGUFParameter]
    rows: list[FormatRow]
    files: dict[str, dict[str, Any]]
    config: dict[str, Any]
    tokenizer: TokenizerFiles | None
    copied: tuple[Path, ...]
    measured: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to write."""
        return writer.total_size(self.files)


def prepare(
    file: str | Path,
    options: GGUFOptions | None = None,
    *,
    config_from: str | Path | None = None,
    heads_from: str | Path | None = None,
    heads_for: Path | None = None,
    shard_bytes: int = writer.SHARD_BYTES,
    measure: bool = True,
) -> Prepared:
    """Return the plan of a GGUF file's transcoding; ValueError, one line, for a file that cannot be transcoded.

    config_from: directory or repository whose config.json and tokenizer replace those made from the metadata.
    heads_from: another GGUF file, whose heads replace this file's. heads_for: directory of a checkpoint for which
    only the heads are transcoded. shard_bytes: maximum bytes of a file of the target's tensors, unless it has only
    one tensor. measure: measure errors on samples of the weights, and make the tokenizer. Unless only heads are
    transcoded, the model is built once from the planned shapes; ValueError also if that fails.
    """
    options = options or GGUFOptions()
    small = None if config_from is None else resolve(config_from, files=SMALL_FILES)
    source = open_source(
        file, config_from=heads_for or small, heads_from=heads_from, heads_only=heads_for is not None
    )
    parameters = make_plan(source, options)
    trunk = [p for p in parameters if not p.path.startswith("mtp.")]
    heads = [p for p in parameters if p.path.startswith("mtp.")]
    files: dict[str, Any] = writer.shards(_outputs(trunk), shard_bytes) if trunk else {}
    files |= {SIDECAR: _outputs(heads)} if heads else {}
    made = make_tokenizer(source.meta) if trunk and measure and small is None else None
    config = _config(source, options, parameters, made)
    if trunk:
        _check_loads(files, config, source)
    try:
        rows = summarize(parameters, measure=measure)
    except ValueError as e:
        raise ValueError(f"{source.meta.file}: {e}") from None
    return Prepared(
        source, parameters, rows, files, config, made, () if small is None else copied_files(small), measure
    )


def _outputs(parameters: list[GGUFParameter]) -> Any:
    return {name: output for parameter in parameters for name, output in parameter.outputs().items()}


def copied_files(directory: Path) -> tuple[Path, ...]:
    """Return the small files of a directory, such as its tokenizer's, that a transcoding copies."""
    found = {file for pattern in SMALL_FILES for file in directory.glob(pattern)}
    return tuple(sorted(file for file in found if file.is_file() and file.name not in NOT_COPIED))


def _config(
    source: GGUFSource, options: GGUFOptions, parameters: list[GGUFParameter], tokenizer: TokenizerFiles | None
) -> dict[str, Any]:
    """Return the content of a transcoding's config.json: the source's, with the plan's dtype and quantization.

    tokenizer: its stop tokens, if it has some, replace the source's; None keeps those.
    """
    dropped = ("quantization", "quantization_config", "torch_dtype", "dtype")
    kept = {name: value for name, value in source.config.items() if name not in dropped}
    kept["dtype"] = str(activations(source, options)).rpartition(".")[2]
    if tokenizer is not None and tokenizer.end_tokens:
        kept["eos_token_id"] = tokenizer.end_tokens
    found = listed_quantization(parameters)
    return kept if found is None else kept | {"quantization": found}


def _check_loads(files: dict[str, dict[str, Any]], config: dict[str, Any], source: GGUFSource) -> None:
    """Build the model, without data, as a load of the transcoding does; ValueError if that fails."""
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as name:
        write_holes(Path(name), files, config)
        port = find_port(config)
        assert port is not None
        try:
            read_port(port, Path(name), config, Drafting(True, None, {}, None))
        except ValueError as e:
            raise ValueError(str(e).replace(name, source.meta.file)) from None


def write_holes(folder: Path, files: dict[str, dict[str, Any]], config: dict[str, Any]) -> None:
    """Write config.json and sparse safetensors files: headers, and holes instead of data."""
    save_config(dict(config), folder / "config.json")
    for name, tensors in files.items():
        writer.allocate(folder / name, tensors)


def transcode(prepared: Prepared, path: str | Path, progress: writer.Progress | None = None) -> Path:
    """Write a planned transcoding to the new directory `path`, and return it, absolute; a failure leaves no files.

    With heads only, it writes neither config.json nor an index. progress: called with the bytes written, and all
    bytes. ValueError if the directory is not empty, the disk has too little space, or the GGUF file contains NaN,
    infinity, or scales that its plan cannot store.
    """
    new = expanded(path).resolve()
    atomic.check_new(new)
    extra = prepared.tokenizer.files() if prepared.tokenizer else {}
    size = prepared.nbytes + sum(map(len, extra.values())) + sum(file.stat().st_size for file in prepared.copied)
    atomic.check_free(new, size)
    with atomic.directory(new) as folder:
        for file in prepared.copied:
            shutil.copyfile(file, folder / file.name)
        for name, content in extra.items():
            (folder / name).write_bytes(content)
        if SIDECAR not in prepared.files or len(prepared.files) > 1:
            save_config(dict(prepared.config), folder / "config.json")
            (folder / INDEX).write_text(writer.index(prepared.files))
        writing.write({folder / name: part for name, part in prepared.files.items()}, prepared.parameters, progress)
    return new
