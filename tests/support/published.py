"""Read published checkpoints' config.json and tensor names from `fixtures/*.txt`, and write files of that shape.

A fixture's lines: `config` and its JSON; `total`, the number of tensors that was published; `sidecar`, a file and the
prefix of what lies in it; else a tensor's name, shape and dtype (BF16 where none is given). Braces hold ranges and
alternatives; F8/128 and F8/row bring their scales, per block or per row.
"""

import itertools
import json
import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

FILES = sorted((Path(__file__).parent / "fixtures").glob("*.txt"))
BYTES = {"BOOL": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
EXPERTS = ("n_routed_experts", "num_experts", "moe_num_experts")
PER_EXPERT = re.compile(r"\.gate\.weight$|_bias$|\.experts\.(gate_up|down)_proj$|\.moe\.\w+_proj\.weight$")


@dataclass(frozen=True)
class Published:
    config: dict
    tensors: dict[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype
    total: int | None
    sidecar: tuple[str, str] | None

    def heads(self) -> set[str]:
        """The names of heads' tensors, by their layer number or by "mtp"."""
        layers = {**self.config, **self.config.get("text_config", {})}["num_hidden_layers"]
        numbers = {name: re.search(r"layers\.(\d+)\.", name) for name in self.tensors}
        return {n for n, match in numbers.items() if "mtp" in n or (match and int(match[1]) >= layers)}

    def with_experts(self, count: int) -> "Published":
        """Return the checkpoint with at most `count` experts per layer, in config and tensors."""
        config = json.loads(json.dumps(self.config))
        text = config.get("text_config", config)
        field = next((f for f in EXPERTS if f in text), None)
        if field is None:
            return self
        published, text[field] = text[field], count
        tensors = {}
        for name, (shape, dtype) in self.tensors.items():
            number = re.search(r"\.experts\.(\d+)\.", name)
            if number is None or int(number[1]) < count:
                cut = shape[0] == published and PER_EXPERT.search(name)
                tensors[name] = ((count, *shape[1:]) if cut else shape, dtype)
        return replace(self, config=config, tensors=tensors, total=None)


def expanded(pattern: str) -> list[str]:
    parts = re.split(r"\{([^}]*)\}", pattern)
    return ["".join(names) for names in itertools.product(*(_choices(*p) for p in enumerate(parts)))]


def _choices(i: int, part: str) -> list[str]:
    if i % 2 == 0:
        return [part]
    found: list[str] = []
    for item in part.split(","):
        ends = re.fullmatch(r"(\d+)-(\d+)", item)
        found += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [item]
    return found


def read_config(file: Path) -> dict:
    return json.loads(next(line[7:] for line in file.read_text().splitlines() if line.startswith("config ")))


def read(file: Path) -> Published:
    config, total, sidecar, tensors = {}, None, None, {}
    for line in file.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "config":
            config = json.loads(rest)
        elif word == "total":
            total = int(rest)
        elif word == "sidecar":
            sidecar = tuple(rest.split())
        elif word != "#":
            sizes, _, dtype = rest.partition(" ")
            stored = _stored(tuple(map(int, sizes.split("x"))), dtype).items()
            tensors |= {name + suffix: entry for name in expanded(word) for suffix, entry in stored}
    return Published(config, tensors, total, sidecar)


def _stored(shape: tuple[int, ...], dtype: str) -> dict:
    """Return the shapes and dtypes of a tensor and its scale, by name suffix."""
    if dtype == "F8/128":
        blocks = tuple(-(-size // 128) for size in shape)
        return {"": (shape, "F8_E4M3"), "_scale_inv": (blocks, "F32")}
    if dtype == "F8/row":
        return {"": (shape, "F8_E4M3"), "_scale": ((shape[0], 1), "F32")}
    return {"": (shape, dtype or "BF16")}


def write(path: Path, published: Published) -> Path:
    """Write a checkpoint directory of the published sizes; the data is a hole in the file, so it takes no space."""
    (path / "config.json").write_text(json.dumps(published.config))
    sidecar, prefix = published.sidecar or ("", "\0")
    of_heads = {name: t for name, t in published.tensors.items() if name.startswith(prefix)}
    _write_file(path / "model.safetensors", {n: t for n, t in published.tensors.items() if n not in of_heads})
    if of_heads:
        _write_file(path / sidecar, of_heads)
        files = {name: sidecar if name in of_heads else "model.safetensors" for name in published.tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def _write_file(file: Path, tensors: dict) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
