"""Test the files of a conversion, refused arguments, and the command line."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import published
import pytest
import tiny
from command_line import call
from layouts import in_shards, left
from mlx.utils import tree_flatten
from safetensors import safe_open
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.checkpoint import convert_precision, convert_writer
from mlx_mtp.checkpoint.convert import convert, extract_heads, open_source
from mlx_mtp.cli.convert import RECIPES
from mlx_mtp.demo import demo_path
from mlx_mtp.layers.port import Port

SHARD = 20_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return in_shards(tmp_path_factory.mktemp("source"))


def test_written_files(source, tmp_path):
    reported = []
    done = convert(
        source, tmp_path / "a" / "new", shard_bytes=SHARD, progress=lambda *counts: reported.append(counts)
    )
    new = tmp_path / "a" / "new"
    assert left(tmp_path / "a")[0] == "new"
    assert done.path == new
    index = json.loads((new / "model.safetensors.index.json").read_text())
    files = sorted(new.glob("*.safetensors"))
    assert len(files) > 5
    assert [f.name for f in files[:-1]] == [
        f"model-{i:05d}-of-{len(files) - 1:05d}.safetensors" for i in range(1, len(files))
    ]
    assert files[-1].name == "mtp.safetensors"
    found = {}
    for file in files:
        with safe_open(file, "numpy") as f:
            assert f.metadata() == {"format": "mlx", "norms": "converted"}
            sizes = {name: f.get_tensor(name).nbytes for name in f.keys()}  # noqa: SIM118
            assert {name: index["weight_map"][name] for name in sizes} == dict.fromkeys(sizes, file.name)
        assert file.name == "mtp.safetensors" or len(sizes) == 1 or sum(sizes.values()) <= SHARD
        found |= sizes
    assert found.keys() == index["weight_map"].keys()
    assert done.nbytes == sum(found.values()) == index["metadata"]["total_size"]
    assert reported[-1] == (done.nbytes, done.nbytes)
    assert [total for _, total in reported] == [done.nbytes] * len(found)
    assert sorted(done for done, _ in reported) == [done for done, _ in reported]
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "LICENSE.md"}
    for name in copied | {"generation_config.json"}:
        assert (new / name).read_bytes() == (source / name).read_bytes()
    written = {f.name for f in new.iterdir()} - {f.name for f in files} - copied
    assert written == {"config.json", "generation_config.json", "model.safetensors.index.json"}
    config = json.loads((source / "config.json").read_text())
    gone = {"quantization_config", "vision_config"}
    kept = {name: value for name, value in config.items() if name not in gone} | {"eos_token_id": [3, 4]}
    assert json.loads((new / "config.json").read_text()) == kept


@pytest.mark.parametrize("limit", [1, 100, 2000, 10**9])
def test_shards_keep_the_order_and_the_limit(limit):
    tensors = {f"{i}": mx.zeros((n,), mx.uint8) for i, n in enumerate([90, 5, 5, 100, 101, 1, 99, 0, 1])}
    parts = list(convert_writer.shards(tensors, limit).values())
    assert [name for part in parts for name in part] == list(tensors)
    sizes = [[w.nbytes for w in part.values()] for part in parts]
    assert all(sum(part) <= limit or sum(map(bool, part)) == 1 for part in sizes)
    assert all(sum(a) + b[0] > limit for a, b in itertools.pairwise(sizes))


def test_a_file_holds_every_type(tmp_path):
    values = mx.array([[0, 1, 2], [3, 100, 250]])
    tensors = {str(dtype): values.astype(dtype) for dtype in convert_writer.DTYPES if dtype != mx.float64}
    tensors |= {"scalar": mx.array(1.5), "none": mx.zeros((0, 3)), "turned": values.T, "part": values[:, 1:]}
    written, order = dict(tensors), []
    size = convert_writer.file_size(tensors)
    file = tmp_path / "x.safetensors"
    assert convert_writer.write({file: written}, lambda name, w: order.append(name)) < size
    assert (written, order) == ({}, list(tensors))
    assert file.stat().st_size == size
    back, metadata = mx.load(str(file), return_metadata=True)
    assert metadata == {"format": "mlx", "norms": "converted"}
    assert {name: w.dtype for name, w in back.items()} == {name: w.dtype for name, w in tensors.items()}
    assert all(mx.array_equal(back[name], w) for name, w in tensors.items())


MISTAKES = {
    "q_bits=7: affine allows 2, 3, 4, 5, 6, 8": {"quantize": True, "q_bits": 7},
    "q_group_size=48: affine allows 32, 64, 128": {"quantize": True, "q_group_size": 48},
    "q_mode='int4': allowed are affine, mxfp4, nvfp4, mxfp8": {"quantize": True, "q_mode": "int4"},
    "q_bits=8: mxfp4 allows 4": {"quantize": True, "q_mode": "mxfp4", "q_bits": 8},
    "mtp_q_bits=1: affine allows 2, 3, 4, 5, 6, 8": {"mtp_q_bits": 1},
    "mtp_q_group_size=7: affine allows 32, 64, 128": {"mtp_q_group_size": 7},
    "mtp_q_group_size=32: not with mtp_q_bits=16, no quantization": {"mtp_q_group_size": 32, "mtp_q_bits": 16},
    "dtype='int8': allowed are float16, bfloat16, float32": {"dtype": "int8"},
    "dequantize=True: not together with quantize=True or bits of the heads": {"quantize": True, "dequantize": True},
    "mtp_layout='both': allowed are sidecar, shards": {"mtp_layout": "both"},
    "quant_predicate='x': allowed are mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6": {"quant_predicate": "x"},
    "quant_predicate='mixed_4_6': only with quantize=True and q_mode='affine'": {"quant_predicate": "mixed_4_6"},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_arguments_are_refused_before_anything_is_read(tmp_path, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        convert(tmp_path / "nowhere", tmp_path / "new", **MISTAKES[message])


def test_directories_that_are_refused(source, tmp_path, monkeypatch):
    before = left(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "disk").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: path.name == "disk")
    monkeypatch.chdir(tmp_path / "here")
    cases = {
        source: "at or inside the directory to convert",
        source / "mtp": "at or inside the directory to convert",
        tmp_path / "link": "at or inside the directory to convert",
        tmp_path / "full": "already there and not empty; name a new directory, or delete it",
        tmp_path / "a file": "already there and no directory",
        tmp_path / "disk": "a mounted disk; name a new directory on it",
        ".": "the working directory; name a new directory in it",  # a shell there would stay in a deleted directory
    }
    for path, words in cases.items():
        with pytest.raises(ValueError, match=rf"^mlx_path=\S.*: {words}"):
            convert(source, path)
    assert left(source) == before
    assert left(tmp_path) == ["a file", "disk", "full", "full/a", "here", "link"]


@pytest.mark.parametrize("target", [True, False])
def test_a_link_to_an_empty_directory_or_to_none(source, tmp_path, target):
    """The conversion is written to the link's target, and the link stays a link."""
    if target:
        (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert convert(source, tmp_path / "link").path == tmp_path / "empty"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "mtp.safetensors").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "link"]


def test_no_more_files_are_open_than_there_are(source, monkeypatch):
    """A process can open only 256 files on a Mac, and large checkpoints have 163."""
    sanitized, opened = Port.sanitized, []

    def counted(model, trunk, heads, **shift):
        opened.append(len(os.listdir("/dev/fd")))
        return sanitized(model, trunk, heads, **shift)

    monkeypatch.setattr(Port, "sanitized", counted)
    before, files = len(os.listdir("/dev/fd")), len(list(source.glob("*.safetensors")))
    open_source(source)
    assert len(opened) == 1
    assert files <= opened[0] - before <= files + 1  # one has tensors of trunk and heads


def test_refused_arguments_for_heads_alone(source, tmp_path):
    (tmp_path / "mtp.safetensors").write_text("mine")
    for path in (tmp_path, tmp_path / "mtp.safetensors"):
        with pytest.raises(ValueError, match=r"^mtp_path=\S+mtp\.safetensors: already there"):
            extract_heads(source, path)
    with pytest.raises(ValueError, match=r"head: allowed are an existing directory, or a new file \*\.safetensors"):
        extract_heads(source, tmp_path / "head")
    weights = {name: w for file in source.glob("model-*.safetensors") for name, w in mx.load(str(file)).items()}
    config = json.loads((source / "config.json").read_text())
    tiny.save(tmp_path / "b", config, {n: w for n, w in weights.items() if not n.startswith("model.layers.3.")})
    with pytest.raises(ValueError, match="no MTP heads found"):
        extract_heads(tmp_path / "b", tmp_path / "new.safetensors")
    with pytest.warns(UserWarning, match="no MTP heads found"):
        convert(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new" / "mtp.safetensors").exists()
    assert (tmp_path / "mtp.safetensors").read_text() == "mine"


def test_sources_that_are_refused(source, tmp_path):
    for damage, words in (
        (lambda p: (p / "model-1.safetensors").unlink(), r"model-1\.safetensors: missing"),
        (lambda p: os.truncate(p / "model-1.safetensors", 5000), r"model-1\.safetensors: truncated or damaged"),
        (lambda p: (p / "config.json").write_text('{"model_type": "gemma3"}'), "mlx-lm cannot convert it"),
    ):
        path = shutil.copytree(source, tmp_path / "damaged", symlinks=True)
        damage(path)
        with pytest.raises(ValueError, match=words):
            convert(path, tmp_path / "new")
        shutil.rmtree(path)
    assert left(tmp_path) == []


def test_the_command_converts_and_the_result_generates(tmp_path):
    new = tmp_path / "new"
    flags = ("-q", "--q-bits", 8, "--mtp-q-bits", 6, "--dtype", "float32")  # faster on a CPU
    done = call("convert", "--hf-path", demo_path(), "--mlx-path", new, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == ["wrote", str(new)]
    assert "MTP heads  3, mtp.safetensors" in done.stdout
    assert "6-bit affine g64 (27 modules)" in done.stdout
    heads = ("convert", "--model", demo_path(), "--mtp-only", "--mtp-path", tmp_path / "head.safetensors")
    assert call(*heads, "--mtp-q-bits", 4).returncode == 0
    assert mlx_mtp.load_model(new, mtp_path=heads[-1], lazy=True).report.head_quantization.startswith("4-bit affine")
    question = ("generate", "-p", "What does os.path.join do?", "--quiet", "--no-adaptive", "-m", 12)
    ways = (), ("--mtp-path", heads[-1])
    texts = {call(*question, "--model", new, *more).stdout for more in sampled(ways[:1], ways)}
    assert len(texts) == 1
    assert texts.pop().startswith("Join two or more pathname components")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--q-bits", 8], "--q-bits: only with -q"),
        (["--quant-predicate", "mixed_4_6"], "--quant-predicate: only with -q"),
        (["--mtp-only"], "--mtp-only and --mtp-path: give both or neither"),
        (["--mtp-path", "x.safetensors"], "--mtp-only and --mtp-path: give both or neither"),
        (["--mtp-only", "--mtp-path", "x.safetensors", "-q"], "--quantize: not with --mtp-only; --mtp-q-bits is"),
        (["-q", "-d"], "not together with quantize=True"),
        (["-q", "--q-bits", 1], "Invalid value for '--q-bits'"),
        (
            ["--mtp-only", "--mtp-path", "x.safetensors", "--mtp-layout", "shards"],
            "--mtp-layout: not with --mtp-only",
        ),
        (["-q", "--q-group-size", 16], "--q-group-size': q_group_size=16: affine allows 32, 64, 128"),
        (["--upload-repo", "me/mine"], "nothing is uploaded from here; `hf upload me/mine MLX_PATH` does it"),
        (["--mlx-path", "."], "already there and not empty"),
        (["--mlx-path", ""], "already there and not empty"),
    ],
)
def test_flags_that_are_refused(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    done = call("convert", "--hf-path", demo_path(), *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert left(tmp_path) == ["mine"]


def test_recipes_are_known_where_they_are_named():
    assert RECIPES == convert_precision.RECIPES


RELEASED = ("deepseek-v3", "glm-4.6", "qwen3.6-35b-a3b", "nemotron-3-super", "step-3.5-flash", "mimo-v2-flash")


@pytest.mark.parametrize("name", sampled(RELEASED[2::2], RELEASED))
def test_released_names_are_found_again(tmp_path, name):
    """Converted names of released checkpoints' tensors, with four experts per layer, are one whole model again."""
    file = next(file for file in published.FILES if file.stem == name)
    source = open_source(published.write(tmp_path, published.read(file).with_experts(4)))
    model, layers = source.model, source.model.args.num_hidden_layers
    trunk, heads = source.tensors()
    places = {stored: model.spec.locate(stored, layers) for stored in heads}
    assert {f"mtp.{depth}.{path}" for depth, path in places.values()} == {
        path for path, _ in tree_flatten(model.parameters()) if path.startswith("mtp.")
    }
    assert not any(model.spec.locate(stored, layers) for stored in trunk)
    for stored in trunk | heads:
        path = "mtp.{}.{}".format(*places[stored]) if stored in heads else stored
        assert model.renamed(stored) == [path]
    assert model.BASE.sanitize(model, trunk | heads).keys() == trunk.keys()  # mlx-lm leaves such heads out


@sweep
def test_memory_is_that_of_a_stack_not_of_the_model(tmp_path):
    """Memory is needed for the experts of one projection at a time, of 16 layers: sources and result."""
    sizes = "--megabytes", "64", "--shard", "4", "--experts", "8"
    flags = [*sizes, "--target", "4 bits", "--out", tmp_path / "found"]
    bench = Path(__file__).parents[2] / "bench" / "convert_memory.py"
    subprocess.run([sys.executable, bench, *flags], check=True, capture_output=True)
    counts = json.loads((tmp_path / "found").read_text())
    assert counts["total"] > 14 * counts["stack"] > 14 * counts["shard"]
    assert counts["found"]["4 bits"]["mlx_peak"] < 3.5 * counts["stack"]
    assert counts["found"]["4 bits"]["resident"] < counts["total"] / 3
