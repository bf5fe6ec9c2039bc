"""Measure CPU time and memory of `mlx-mtp convert --gguf` on a file of random blocks in the shapes of an 8B model.

    python bench/gguf_transcode.py [--layers 32] [--folder FOLDER] [--out FILE]

The file has the types of llama.cpp's Q4_K_M; 27 layers are 4.2 GB, 32 layers are 4.9 GB. One process converts it, and
both are deleted. The folder needs room for 2.3 times the file. The last line is one JSON object.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import gguf
import numpy as np

from mlx_mtp.bench.result import environment

RESIDENT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
H, INNER, KV, V = 4096, 14336, 1024, 128256
KINDS = gguf.GGMLQuantizationType
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*"abcdefgh", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}
NUMBERS = {
    "context_length": 8192,
    "embedding_length": H,
    "feed_forward_length": INNER,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
}


def matrices(layers: int) -> Iterator[tuple[str, tuple[int, int], KINDS]]:
    """Yield each matrix's name, shape and type: half of the values and down-projections in Q6_K, as in Q4_K_M."""
    yield "token_embd.weight", (V, H), KINDS.Q4_K
    for i in range(layers):
        better = KINDS.Q6_K if i % 2 else KINDS.Q4_K
        yield f"blk.{i}.attn_q.weight", (H, H), KINDS.Q4_K
        yield f"blk.{i}.attn_k.weight", (KV, H), KINDS.Q4_K
        yield f"blk.{i}.attn_v.weight", (KV, H), better
        yield f"blk.{i}.attn_output.weight", (H, H), KINDS.Q4_K
        yield f"blk.{i}.ffn_gate.weight", (INNER, H), KINDS.Q4_K
        yield f"blk.{i}.ffn_up.weight", (INNER, H), KINDS.Q4_K
        yield f"blk.{i}.ffn_down.weight", (H, INNER), better
    yield "output.weight", (V, H), KINDS.Q6_K


def norms(layers: int) -> list[str]:
    blocks = [f"blk.{i}.{name}_norm.weight" for i in range(layers) for name in ("attn", "ffn")]
    return [*blocks, "output_norm.weight"]


def blocks(shape: tuple[int, int], kind: KINDS) -> np.ndarray:
    """Return random blocks of a matrix, uint8 [rows, bytes of a row], whose float16 scales are small."""
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    found = np.random.default_rng(0).integers(0, 256, (shape[0] * shape[1] // values, nbytes), np.uint8)
    scale = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    for at in (0, 2) if kind == KINDS.Q4_K else (nbytes - 2,):
        found[:, at : at + 2] = scale
    return found.reshape(shape[0], -1)


def write_file(path: Path, layers: int) -> int:
    """Write the GGUF file tensor by tensor; return its size in bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (NUMBERS | {"block_count": layers}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in TOKENIZER.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_array(key, value)
    for name in norms(layers):
        writer.add_tensor_info(name, (H,), np.dtype(np.float32), 4 * H)
    for name, shape, kind in matrices(layers):
        values, nbytes = gguf.GGML_QUANT_SIZES[kind]
        row = shape[1] // values * nbytes
        writer.add_tensor_info(name, (shape[0], row), np.dtype(np.uint8), shape[0] * row, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms(layers):
        writer.write_tensor_data(np.ones(H, np.float32))
    for _, shape, kind in matrices(layers):
        writer.write_tensor_data(blocks(shape, kind))
    writer.close()
    return path.stat().st_size


@click.command()
@click.option("--layers", default=32, show_default=True, help="Of the model.")
@click.option("--folder", type=click.Path(path_type=Path), help="For the files.  [default: a temporary one]")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(layers: int, folder: Path | None, out: Path | None) -> None:
    """Measure a transcoding."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        file, new = Path(name) / "x.gguf", Path(name) / "new"
        size = write_file(file, layers)
        command = [sys.executable, "-m", "mlx_mtp", "convert", "--gguf", str(file), "--mlx-path", str(new)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise click.ClickException("the conversion failed")
        written = sum(part.stat().st_size for part in new.glob("*.safetensors"))
    facts = {"file": size, "written": written, "user": used.ru_utime, "system": used.ru_stime}
    facts["resident"] = used.ru_maxrss * RESIDENT
    print(
        f"{size / 1e9:.2f} GB to {written / 1e9:.2f} GB: {used.ru_utime:.0f} s user, {used.ru_stime:.0f} s system, ",
        end="",
    )
    print(f"at most {facts['resident'] / 1e6:.0f} MB resident")
    line = json.dumps({"bench": "gguf_transcode", "environment": environment(), "layers": layers, **facts})
    print(line)
    if out is not None:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
