"""Small complete checkpoints as files in memory, and kinds of damage that hypothesis chooses."""

import json
import os
import struct
from pathlib import Path

import families
import numpy as np
import tiny
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<e>", "<u>", "<a>"]
LETTERS = "abcdefghij"  # 13 tokens with the special ones, as in the tiny families
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '<e>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
STEP = {**tiny.CONFIG, "vocab_size": 13}
PLAIN = {
    "model_type": "starcoder2",
    "hidden_size": 32,
    "vocab_size": 13,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "norm_epsilon": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
INDEX = "model.safetensors.index.json"
Files = dict[str, bytes]
Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> type, shape, data


def write_tokenizer(path: Path, letters: str = LETTERS) -> None:
    tokens = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="a"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    TokenizerWrapper(fast).save_pretrained(path)


def build(kind: str, path: Path) -> Files:
    """Return the files of a valid checkpoint: "step3p5" in one file, "sharded" with an index and a sidecar of heads,
    "plain" without a port, or any family of `families`."""
    if kind == "step3p5":
        tiny.save(path, STEP, tiny.random_weights(STEP))
    elif kind == "plain":
        families.headless(path, PLAIN)
    else:
        families.build("glm4_moe" if kind == "sharded" else kind, path)
    write_tokenizer(path)
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return _sharded(files) if kind == "sharded" else files


def _sharded(files: Files) -> Files:
    tensors = unpack(files.pop("model.safetensors"))
    parts: dict[str, Tensors] = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        file = "mtp.safetensors" if ".layers.3." in name else f"model-0000{1 + i % 2}-of-00002.safetensors"
        parts.setdefault(file, {})[name] = tensor
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    return files | {file: pack(part) for file, part in parts.items()} | {INDEX: json.dumps(index).encode()}


def unpack(blob: bytes) -> Tensors:
    (length,) = struct.unpack("<Q", blob[:8])
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    header.pop("__metadata__", None)
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def pack(tensors: Tensors, metadata: dict | None = None) -> bytes:
    header: dict = {"__metadata__": metadata or {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    return packed(json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def packed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def put(path: Path, files: Files) -> Path:
    """Write the files; content that begins with "->" is a link, "|" a pipe, "/" a directory, "~" a GB of zeros."""
    path.mkdir()
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        if content.startswith(b"->") and b"\0" not in content:
            file.symlink_to(os.fsdecode(content[2:]) or "nowhere")
        elif content == b"|":
            os.mkfifo(file)
        elif content == b"/":
            file.mkdir()
        elif content == b"~":
            file.touch()
            os.truncate(file, 1 << 30)
        else:
            file.write_bytes(content)
    return path


# Each receives `draw` and files, changes the files, and returns a description.


def cut_bytes(draw, files: Files) -> str:
    if not files:
        return "nothing"
    name = draw(st.sampled_from(sorted(files)))
    content = files[name]
    at = draw(st.one_of(st.sampled_from([0, 1, 7, 8, 9, len(content) - 1]), st.integers(0, len(content))))
    files[name] = content[: max(at, 0)]
    return f"{name} cut at {at}"


def flip_bits(draw, files: Files) -> str:
    if not files:
        return "nothing"
    name = draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name] or b"\0")
    last = len(content) - 1
    bits = draw(
        st.lists(st.tuples(st.integers(0, min(last, draw(st.sampled_from([20, 500, last])))), st.integers(0, 7)))
    )
    for at, bit in bits:
        content[at] ^= 1 << bit
    files[name] = bytes(content)
    return f"{name} bits {bits}"


def junk(draw, files: Files) -> str:
    if not files:
        return "nothing"
    name = draw(st.sampled_from(sorted(files)))
    content = draw(
        st.sampled_from([b"", b"\0" * 64, b"{", b"[]", b"{}", b"null", b"\xff\xfe{}", b"9" * 5000, b"[" * 3000])
    )
    files[name] = content if draw(st.booleans()) else files[name] + content
    return f"{name} ends in or is {content[:9]!r}"


def odd_file(draw, files: Files) -> str:
    added = ["model-extra.safetensors", "mtp.safetensors", INDEX, "mtp/a.safetensors", "chat_template.jinja"]
    name = draw(st.sampled_from(sorted({*files, *added})))
    content = draw(
        st.sampled_from(
            [None, b"->" + name.encode(), b"->nowhere", b"->/dev/zero", b"->..", b"->.", b"|", b"/", b"~"]
        )
    )
    files.pop(name, None)
    if content is not None:
        files[name] = content
    return f"{name} is {content!r}"


def same_again(draw, files: Files) -> str:
    """Copy a shard to another name."""
    if not (shards := sorted(n for n in files if n.endswith(".safetensors"))):
        return "nothing"
    name = draw(st.sampled_from(shards))
    other = draw(st.sampled_from(["model-copy.safetensors", "mtp.safetensors", "model-mtp-copy.safetensors"]))
    files[other] = files[name]
    return f"{name} again as {other}"


def index_entry(draw, files: Files) -> str:
    try:
        listed = json.loads(files.get(INDEX, b'{"weight_map": {}}'))
        known = [*dict(listed["weight_map"]), "other"]
    except (ValueError, TypeError, KeyError):
        return "nothing"
    outside = ["../x.safetensors", "/etc/passwd", "a/../../x", "", ".", "..", "model.safetensors\0", "~/x", "none"]
    value = draw(st.sampled_from([*outside, *ODD]))
    where = draw(st.sampled_from(["all", "entry", "map"]))
    if where == "all":
        listed = value
    elif where == "map":
        listed["weight_map"] = value
    else:
        listed["weight_map"][draw(st.sampled_from(known))] = value
    files[INDEX] = json.dumps(listed).encode()
    return f"index {where} {value!r}"


ODD = [None, True, False, -1, 0, 1, 2, 3, 5, 7, 64, 1000, 10**6, 10**9, 2**31, 2**63, 10**30, -0.5, 0.5, 1e-30, 1e308]
ODD += [
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "\ud800",
    [],
    [1],
    [[]],
    [0] * 50,
    ["full_attention"] * 3,
    {},
    {"a": 1},
]


def config_entry(draw, files: Files) -> str:
    name = draw(
        st.sampled_from([n for n in ("config.json", "tokenizer_config.json", "tokenizer.json") if n in files])
    )
    try:
        tree = json.loads(files[name])
    except (ValueError, RecursionError):
        return "nothing"
    change = change_entry(draw, tree)
    files[name] = json.dumps(tree).encode()
    return f"{name} {change}"


def change_entry(draw, tree) -> str:
    """Delete or replace an entry of a JSON value; return a description."""
    node, path = tree, []
    while isinstance(node, dict | list) and node:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append(key)
        if not isinstance(node[key], dict | list) or not node[key] or draw(st.booleans()):
            break
        node = node[key]
    if not path:
        return "nothing"
    value = draw(st.sampled_from([*ODD, ...]))
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return f"{path} = {value!r}"


def header_entry(draw, files: Files) -> str:
    if not (shards := sorted(n for n in files if n.endswith(".safetensors"))):
        return "nothing"
    name = draw(st.sampled_from(shards))
    try:
        (length,) = struct.unpack("<Q", files[name][:8])
        header, data = json.loads(files[name][8 : 8 + length]), files[name][8 + length :]
        entry = header[tensor := draw(st.sampled_from(sorted(header)))]
    except (ValueError, TypeError, KeyError, struct.error, IndexError, RecursionError):
        return "nothing"
    if not isinstance(entry, dict):
        return "nothing"
    kind = draw(
        st.sampled_from(["length", "offsets", "shape", "dtype", "entry", "twice", "name", "deep", "metadata"])
    )
    text, length, value = None, None, None
    if kind == "length":
        length = value = draw(
            st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, len(data), 10**8])
        )
    elif kind == "offsets":
        entry["data_offsets"] = value = draw(
            st.sampled_from(
                [[0, 0], [-4, 0], [4, 0], [0, 2**63], [2**64, 2**64 + 4], [0.0, 4.5], ["0", "4"], [0], None, [0, 1]]
            )
        )
    elif kind == "shape":
        entry["shape"] = value = draw(
            st.sampled_from([[], [0], [-1, 4], [2**32, 2**32], [2**63], [1.5], "3", None, [1] * 70, [[3]]])
        )
    elif kind == "dtype":
        entry["dtype"] = value = draw(
            st.sampled_from(["F64", "I32", "U32", "F16", "F8_E4M3", "F4", "C64", "BOOL", "X", "", 5, None])
        )
    elif kind == "entry":
        header[tensor] = value = draw(st.sampled_from(ODD))
    elif kind == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(tensor)}: {json.dumps(entry)}}}"
    elif kind == "name":
        value = draw(
            st.sampled_from(["", "x", "\0", "../x", "é" * 300, "__metadata__", "model.norm.weight", "\ud800"])
        )
        header[value] = header.pop(tensor)
    elif kind == "deep":
        text = "[" * 50000
    else:
        header["__metadata__"] = value = draw(
            st.sampled_from([{}, {"format": 5}, {"format": "pt"}, {"format": "mlx"}, *ODD])
        )
    files[name] = packed((text or json.dumps(header)).encode(errors="surrogatepass"), data, length)
    return f"{name} {tensor} {kind} {value!r}"


def tensor_values(draw, files: Files) -> str:
    if not (shards := sorted(n for n in files if n.endswith(".safetensors"))):
        return "nothing"
    name = draw(st.sampled_from(shards))
    try:
        tensors = unpack(files[name])
        tensor = draw(st.sampled_from(sorted(tensors)))
        dtype, shape, data = tensors[tensor]
        values = np.frombuffer(data, "<f4").reshape(shape).copy()
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, IndexError, RecursionError):
        return "nothing"
    kind = draw(
        st.sampled_from(
            ["gone", "nan", "one nan", "zero", "inf", "huge", "turned", "cut", "axis", "type", "swap", "new"]
        )
    )
    if kind == "gone":
        del tensors[tensor]
    elif kind == "swap":
        other = draw(st.sampled_from(sorted(tensors)))
        tensors[tensor], tensors[other] = tensors[other], tensors[tensor]
    elif kind == "new":
        tensors[draw(st.sampled_from(["model.layers.9.x.weight", "x", f"{tensor}.scales", "mtp.fc.weight"]))] = (
            tensors[tensor]
        )
    elif kind == "type":
        dtype, as_type = draw(
            st.sampled_from([("F16", "<f2"), ("F64", "<f8"), ("I32", "<i4"), ("U8", "u1"), ("BOOL", "?")])
        )
        with np.errstate(all="ignore"):
            tensors[tensor] = (dtype, shape, values.astype(as_type).tobytes())
    else:
        changed = {
            "nan": values * np.nan,
            "zero": values * 0,
            "inf": values + np.inf,
            "huge": np.sign(values) * np.float32(3e38),
            "turned": values.T,
            "cut": values[:-1],
            "axis": values[None],
        }.get(kind)
        if changed is None:
            changed = values
            changed.flat[:1] = np.nan
        changed = np.ascontiguousarray(changed, "<f4").reshape(changed.shape)
        tensors[tensor] = (dtype, list(changed.shape), changed.tobytes())
    files[name] = pack(tensors)
    return f"{name} {tensor} {kind}"


KINDS = {
    f.__name__: f
    for f in (
        *(cut_bytes, flip_bits, junk, odd_file, same_again, index_entry, config_entry, header_entry, tensor_values),
    )
}
