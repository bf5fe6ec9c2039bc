"""Read damaged, truncated, foreign and hostile GGUF files: a one-line error each, and memory of the file's size."""

import resource
import struct
import sys

import gguf_files
import numpy as np
import pytest
from gguf_metadata import metadata
from gguf_samples import WITH_HEADS, checkpoint, dense
from sweep import SWEEP

from mlx_mtp.checkpoint.gguf import header
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.plan import GGUFOptions

CASES = 20_000 if SWEEP else 60
MOST_GROWTH = 1 << 30  # of the process, in bytes, by all cases
EXTREMES = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
ODD = (
    0,
    1,
    -1.5,
    float("nan"),
    float("inf"),
    2**31,
    "",
    "x" * 100,
    True,
    ["a", "b"],
    [0] * 3,
    [1.5] * 2000,
    2**32 - 1,
)
FAMILIES = (
    "qwen3_5_moe",
    "qwen3_next",
    "glm_moe_dsa",
    "mimo_v2_flash",
    "nemotron_h_latent",
    "step3p5",
    "deepseek_v3",
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """(architecture, metadata, tensors) of families of all kinds."""
    folder, found = tmp_path_factory.mktemp("samples"), []
    for name in ("llama3", "gemma3_text"):
        _, config, arch, tensors = dense(name, folder / name)
        found.append((arch, metadata(arch, config, 0), tensors))
    for name in FAMILIES:
        _, config, weights = checkpoint(name, folder / name)
        arch, heads = WITH_HEADS[name]
        found.append((arch, metadata(arch, config, heads), gguf_files.tensors_of(config, weights)))
    return found


def fails_in_one_line(file, *, may_pass=False):
    try:
        prepare(file)
    except ValueError as e:
        text = str(e)
        assert "\n" not in text
        assert len(text) < 1000
        assert any(part.name in text for part in header.split_names(file)), text
        return text
    assert may_pass
    return None


def change_metadata(rng, values):
    keys = [*values, *gguf_files.letters()]
    key, value = keys[rng.integers(len(keys))], ODD[rng.integers(len(ODD))]
    if key in values:
        return {**values, key: value}, gguf_files.letters()
    return values, {**gguf_files.letters(), key: value}


def change_tensors(rng, tensors):
    names = list(tensors)
    name, kind = names[rng.integers(len(names))], rng.integers(6)
    w, others = tensors[name], {n: t for n, t in tensors.items() if n != name}
    if kind == 0:
        return others
    if kind == 1:
        return others | {names[rng.integers(len(names))] + ".more": w}
    if kind == 2:
        return others | {name.replace("blk.", "blk.9"): w}
    if kind == 3:
        return tensors | {name: w.reshape(-1)}
    if kind == 4:
        return tensors | {name: np.concatenate([w, w])}
    return tensors | {name: w * np.float32(np.nan)}


def change_bytes(rng, data, end):
    data = bytearray(data)
    kind, at = rng.integers(4), int(rng.integers(end))
    if kind == 0:
        return data[: int(rng.integers(len(data)))]
    if kind == 1:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        data[at : at + 8] = struct.pack("<Q", EXTREMES[rng.integers(len(EXTREMES))])
    else:
        data[at : at + 4] = struct.pack("<I", EXTREMES[rng.integers(len(EXTREMES))] & 0xFFFFFFFF)
    return data


SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
SPLIT_VALUES = (0, 1, 2, 3, 2**16 - 1, 2**31, "x" * 10_000, True, -1.5, [0] * 3, [1.5] * 2000)


def change_splits(rng, folder, arch, values, tensors):
    """Write a split file of three parts; keys, places of tensors and the files themselves may be wrong or missing.

    Parts may be links to each other, in a circle. Return the part to read.
    """
    names = [folder / f"s-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    shares = [dict(list(tensors.items())[i::3]) for i in range(3)]
    wrong = int(rng.integers(3))
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        name.unlink(missing_ok=True)
        keys = dict(zip(SPLIT_KEYS, (i, 3, len(tensors)), strict=True))
        if i == wrong:
            keys[SPLIT_KEYS[rng.integers(3)]] = SPLIT_VALUES[rng.integers(len(SPLIT_VALUES))]
            share = shares[rng.integers(3)] if rng.integers(2) else share
        gguf_files.write(name, arch, values, share, tokenizer=gguf_files.letters() | keys)
    if (kind := rng.integers(4)) < 3:
        names[wrong].unlink()
        if kind:
            names[wrong].symlink_to(names[(wrong + kind) % 3])
        if kind == 2:
            names[(wrong + 2) % 3].unlink()
            names[(wrong + 2) % 3].symlink_to(names[wrong])
    return names[rng.integers(3)]


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of numpy, on standard error
def test_fuzzed(samples, tmp_path):
    rng, file = np.random.default_rng(0), tmp_path / "x.gguf"
    whole = []
    for arch, values, tensors in samples:
        gguf_files.write(file, arch, values, tensors)
        contents = header.read(file)
        begin = min(entry.begin for entry in contents.tensors.values())
        whole.append((file.read_bytes(), begin))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = set()
    for case in range(CASES):
        number = case % len(samples)
        arch, values, tensors = samples[number]
        if case % 10 == 7:
            split = change_splits(rng, tmp_path, arch, values, tensors)
            outcomes.add(fails_in_one_line(split, may_pass=True) is None)
            continue
        if case % 10 == 8:
            values, tokenizer = change_metadata(rng, values)
            try:
                gguf_files.write(file, arch, values, tensors, tokenizer=tokenizer)
            except (struct.error, ValueError, OverflowError):  # values that the writer refuses
                continue
        elif case % 10 == 9:
            gguf_files.write(file, arch, values, change_tensors(rng, tensors))
        else:
            file.write_bytes(change_bytes(rng, *whole[number]))
        outcomes.add(fails_in_one_line(file, may_pass=True) is None)
    assert outcomes == {True, False}
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < MOST_GROWTH


def head(*, version=3, tensors=0, pairs=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def key(name, kind):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind)


def nested(depth):
    return key("a", 9) + struct.pack("<IQ", 9, 1) * depth


HEADERS = {
    "nothing": (b"", "not a GGUF file"),
    "another format": (b"PK\3\4" + bytes(40), "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), r"version 50331648 \(big-endian\)"),
    "an old version": (head(version=1), "version 1 is not supported"),
    "more tensors than bytes": (head(tensors=2**40), "it claims 1099511627776 entries"),
    "more keys than bytes": (head(pairs=2**62), "claims"),
    "a long key": (head(pairs=1, rest=struct.pack("<Q", 2**63) + bytes(32)), "claims"),
    "a long string": (head(pairs=1, rest=key("a", 8) + struct.pack("<Q", 2**50) + bytes(9)), "claims"),
    "a long array": (head(pairs=1, rest=key("a", 9) + struct.pack("<IQ", 4, 2**61) + bytes(9)), "claims"),
    "an array of arrays of arrays": (head(pairs=1, rest=nested(500)), "metadata of type 9"),
    "an unknown type": (head(pairs=1, rest=key("a", 77) + bytes(16)), "metadata of type 77"),
    "a key twice": (head(pairs=2, rest=(key("a", 4) + bytes(4)) * 2), "'a' is there twice"),
    "a cut number": (head(pairs=1, rest=key("a", 12) + bytes(3)), "truncated or damaged"),
    "no architecture": (head(rest=bytes(32)), "metadata general.architecture is missing"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name, tmp_path):
    content, expected = HEADERS[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=expected) as e:
        prepare(tmp_path / "x.gguf")
    assert "\n" not in str(e.value)


def tensor(name, shape, kind, offset):
    dimensions = b"".join(struct.pack("<Q", n) for n in shape)
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack("<I", len(shape))
        + dimensions
        + struct.pack("<IQ", kind, offset)
    )


TENSORS = {
    "beyond the end": ([tensor("a", [8], 0, 1 << 20)], "'a' is truncated or overlaps another"),
    "not aligned": ([tensor("a", [8], 0, 4)], "'a' is .*or its data are not aligned to 32 bytes"),
    "one over another": ([tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)], "'b' is truncated or overlaps"),
    "twice": ([tensor("a", [8], 0, 0), tensor("a", [8], 0, 32)], "'a' is there twice"),
    "of more values than there can be": ([tensor("a", [2**40, 2**40], 0, 0)], "'a' has shape"),
    "of no values": ([tensor("a", [0], 0, 0)], "'a' has shape"),
    "of many dimensions": ([tensor("a", [1] * 9, 0, 0)], "'a' has 9 dimensions"),
    "of half a block": ([tensor("a", [8], 8, 0)], "'a' has shape"),
    "of an unknown type": ([tensor("a", [8], 99, 0)], "type 99, which the gguf package does not have"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_tables(name, tmp_path):
    entries, expected = TENSORS[name]
    (tmp_path / "x.gguf").write_bytes(head(tensors=len(entries), rest=b"".join(entries)) + bytes(160))
    with pytest.raises(ValueError, match=expected):
        header.read(tmp_path / "x.gguf")


def test_nothing_is_left_of_a_file_with_nan(samples, tmp_path):
    arch, values, tensors = samples[0]
    tensors = {**tensors, "blk.1.ffn_up.weight": tensors["blk.1.ffn_up.weight"] * np.float32(np.inf)}
    gguf_files.write(tmp_path / "x.gguf", arch, values, tensors)
    with pytest.raises(ValueError, match=r"x\.gguf: tensor blk\.1\.ffn_up\.weight holds NaN or infinity"):
        transcode(prepare(tmp_path / "x.gguf"), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gguf"]


def test_scales_beyond_float16(tmp_path):
    _, config, arch, tensors = dense("qwen3", tmp_path / "hub")
    tensors["blk.0.attn_q.weight"] *= 1e6
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, 0), tensors, gguf_files.KINDS.Q8_0)
    with pytest.raises(
        ValueError, match=r"tensor blk\.0\.attn_q\.weight holds scales beyond float16; use --gguf-exact"
    ):
        transcode(prepare(file), tmp_path / "new")
    transcode(prepare(file, GGUFOptions(float32=True)), tmp_path / "new")
    with np.errstate(over="ignore", invalid="ignore"):
        tensors["blk.0.attn_q.weight"] *= 1e6  # the file's own scales, in float16, overflow
        file = gguf_files.write(tmp_path / "y.gguf", arch, metadata(arch, config, 0), tensors, gguf_files.KINDS.Q8_0)
    with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_q\.weight holds NaN or infinity"):
        transcode(prepare(file, measure=False), tmp_path / "infinite")


def test_unread_metadata_that_changes_logits(tmp_path):
    _, config, arch, tensors = dense("llama", tmp_path / "hub")
    changed = metadata(arch, config, 0) | {"logit_scale": 0.5}
    gguf_files.write(tmp_path / "x.gguf", arch, changed, tensors)
    with pytest.raises(ValueError, match=r"llama\.logit_scale=0\.5 is not supported; give --config-from"):
        prepare(tmp_path / "x.gguf")
