"""Files of a checkpoint beyond the limits are refused by name before they are read; so are pipes and devices."""

import json
import os
import struct
from pathlib import Path

import pytest
from command_line import call

from mlx_mtp.checkpoint import draft_vocab, file_sizes, files, weight_names
from mlx_mtp.checkpoint.file_sizes import DRAFT_VOCAB, LARGEST, MOST_HEADER, MOST_TENSORS
from mlx_mtp.checkpoint.gguf import header
from mlx_mtp.demo import demo_path

GENERATE = "generate", "-m", "2", "-p", "a"


@pytest.fixture
def model(tmp_path):
    """A checkpoint of links to the demo's files."""
    (tmp_path / "m").mkdir()
    for source in demo_path().iterdir():
        (tmp_path / "m" / source.name).symlink_to(source)
    return tmp_path / "m"


def sparse(file, size):
    file.unlink(missing_ok=True)
    with file.open("wb") as f:
        f.truncate(size)


NAMES = ["model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer_config.json"]
NAMES += ["tokenizer.json", "chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_beyond_its_limit_is_refused_before_it_is_read(name, model, monkeypatch):
    monkeypatch.setattr(files.mlx_lm_utils, "load_config", lambda _: pytest.fail("read"))
    sparse(model / name, 1 << 30)
    for refuse in (files.local, files.resolve):
        with pytest.raises(
            ValueError, match=rf"/{name}: 1,073,741,824 bytes; allowed are [\d,]+ in a file of this name"
        ):
            refuse(model)
    if name in NAMES[1:3]:
        with pytest.raises(ValueError, match=rf"/{name}: 1,073,741,824 bytes"):
            files.read_config(model)


def test_released_files_are_within_the_limits(model):
    """Twice the largest of each name that is known: Kimi-K2's index, Gemma's tokenizer, a configuration by module."""
    largest = {"model.safetensors.index.json": 20, "config.json": 1, "tokenizer.json": 35, "chat_template.jinja": 0.1}
    for name, size in largest.items():
        sparse(model / name, int(2 * size * 10**6) - 1)
    assert files.local(model) == model
    assert len(LARGEST) == len({pattern for pattern, _ in LARGEST})


def with_entries(count, metadata=0):
    entries = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
    entries |= {"__metadata__": {f"k{i}": "" for i in range(metadata)}} if metadata else {}
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def test_entries_of_all_headers_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(file_sizes, "MOST_TENSORS", 10)
    for name, content in (("a", with_entries(5)), ("b", with_entries(3, 2)), ("c", with_entries(1))):
        (tmp_path / name).write_bytes(content)
    found = [tmp_path / name for name in "abc"]
    assert len(files.read_header(found[:2])) == 5
    with pytest.raises(ValueError, match=r"/c: 11 entries up to this file; allowed are 10 in a checkpoint"):
        files.read_header(found)
    notes = []
    (tmp_path / weight_names.INDEX).write_text(json.dumps({"weight_map": {f"t{i}": "a" for i in range(11)}}))
    assert weight_names.read_index(tmp_path, notes) == {}
    assert "11 entries" in notes[0]


def test_a_long_header_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "safe_open", lambda *_: pytest.fail("parsed"))
    with (tmp_path / "a").open("wb") as f:
        f.write(struct.pack("<Q", MOST_HEADER + 1))
        f.truncate(MOST_HEADER + 9 + 1)
    with pytest.raises(ValueError, match=r"/a: its header has 8,000,001 bytes; allowed are 8,000,000"):
        files.read_header([tmp_path / "a"])
    assert MOST_TENSORS >= 210_000  # Kimi-K2 in 4 bits


@pytest.mark.parametrize("counts", [(0, header.MAX_PAIRS + 1), (header.MAX_TENSORS + 1, 0), (2**40, 1), (1, 2**60)])
def test_entries_of_a_gguf_header_are_counted_before_they_are_read(counts, tmp_path):
    file = tmp_path / "x.gguf"
    with file.open("wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, *counts))
        f.truncate(1 << 24)
    with pytest.raises(ValueError, match=r"/x\.gguf: ([\d,]+ entries in its header; allowed are [\d,]+|truncated)"):
        header.read(file)


FILES = {  # of each option, the arguments before the file's name
    "--json-schema": GENERATE,
    "--grammar": GENERATE,
    "--prompt-cache-file": GENERATE,
    "--draft-vocab": GENERATE,
    "--adapter-path": GENERATE,
    "--mtp-path": GENERATE,
    "--vision-path": GENERATE,
    "--draft-model": GENERATE,
    "--model": GENERATE,
    "--image": GENERATE,
    "--tasks": ("verify-lossless",),
    "--data": ("tune-heads",),
    "--config": ("bench", "model"),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
@pytest.mark.parametrize("option", FILES)
def test_what_is_no_regular_file_is_refused_in_one_line(option, kind, tmp_path):
    """A command that opened the pipe or the device would not end."""
    file = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file)
    result = call(*FILES[option], option, file)
    assert result.returncode in (1, 2), result.stdout
    assert sum("rror: " in line for line in result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize("name", ["mtp/a.safetensors", "config.json", "tokenizer.json", "adapter_config.json"])
def test_pipes_inside_a_checkpoint_are_not_opened(name, model):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    result = call("generate", "--model", model, "-m", "2", "-p", "a", "--ignore-chat-template")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == bool(result.returncode)


def test_a_config_of_very_many_keys_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    for more in ({f"k{i}": i for i in range(2001)}, {"text_config": {f"k{i}": i for i in range(2001)}}):
        with pytest.raises(ValueError, match=r"^config\.json: 2,\d\d\d keys; allowed are 2,000$"):
            files.checked_config({**config, **more}, Path("config.json"))


@pytest.mark.parametrize("inner", [False, True])
def test_a_config_of_very_many_end_tokens_is_refused(model, inner):
    config = json.loads((model / "config.json").read_text())
    for count, allowed in ((1000, True), (1001, False)):
        more = {"eos_token_id": [*range(count)]}
        given = {**config, **({"text_config": more} if inner else more)}
        if allowed:
            files.checked_config(given, Path("config.json"))
        else:
            with pytest.raises(ValueError, match=r"^config\.json: eos_token_id has 1,001 ids; allowed are 1,000$"):
                files.checked_config(given, Path("config.json"))


def test_a_draft_vocabulary_has_a_limit_whatever_its_name(tmp_path):
    with (file := tmp_path / "list.json").open("wb") as f:
        f.truncate(DRAFT_VOCAB + 1)
    with pytest.raises(
        ValueError, match=r"list\.json: 16,000,001 bytes; allowed are 16,000,000 in a file of this kind$"
    ):
        draft_vocab.read(file)
