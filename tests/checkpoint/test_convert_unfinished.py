"""Interrupt conversions: no directory that looks finished is left."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import pytest
from layouts import in_shards, left
from sweep import paired

import mlx_mtp
from mlx_mtp.checkpoint import convert_writer
from mlx_mtp.checkpoint.convert import convert, extract_heads
from mlx_mtp.machine import atomic


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return in_shards(tmp_path_factory.mktemp("source"))


def test_a_disk_that_is_too_small(source, tmp_path, monkeypatch):
    """The written bytes have to fit exactly: with one byte less nothing is written."""
    heads = tmp_path / "heads.safetensors"
    alone = extract_heads(source, heads).path.stat().st_size
    heads.unlink()
    convert(source, tmp_path / "once", quantize=True, q_group_size=32)
    needed = sum(file.stat().st_size for file in (tmp_path / "once").iterdir())
    usage = type(shutil.disk_usage(tmp_path))
    free = [needed * 98 // 100]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - free[0], free[0]))
    new = tmp_path / "deep" / "new"
    with pytest.raises(ValueError, match=rf"{new}: needs \S+ [kM]B, and \S+ [kM]B are free there; delete files"):
        convert(source, new, quantize=True, q_group_size=32)
    assert not new.parent.exists()
    free[0] = needed
    convert(source, new, quantize=True, q_group_size=32)
    free[0] = alone - 1
    with pytest.raises(ValueError, match="are free there"):
        extract_heads(source, heads)
    free[0] += 1
    extract_heads(source, heads)


@pytest.mark.parametrize("alone", [False, True])
def test_what_a_killed_run_left_counts_as_free(source, tmp_path, monkeypatch, alone):
    """Otherwise a disk with space for one conversion would not allow another try."""
    write, new = (extract_heads, tmp_path / "new.safetensors") if alone else (convert, tmp_path / "new")
    write(source, new)
    partial = tmp_path / (new.name + ".partial")
    new.rename(partial)
    if not alone:
        (partial / atomic.NOTE).write_text("")
    usage = type(shutil.disk_usage(tmp_path))
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - free[0], free[0]))
    write(source, new)
    assert [file.name for file in tmp_path.iterdir()] == [new.name]
    new.rename(partial)  # without the note the directory is not ours
    if alone:
        os.truncate(partial, partial.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"^\S+ needs \S+ kB, and \S+ \S+ are free there; delete files"):
        write(source, new)


def test_two_runs_do_not_write_one_file(source, tmp_path):
    """The second run does not disturb the first."""
    new = tmp_path / "new.safetensors"
    messages, calls = [], []

    def again(done, total):
        calls.append(done)
        if len(calls) % 5 != 1:  # each try opens the source
            return
        with pytest.raises(ValueError, match=r"new\.safetensors: another run is writing it; wait until") as caught:
            extract_heads(source, new)
        messages.append(str(caught.value))

    extract_heads(source, new, progress=again)
    assert len(messages) > 2
    extract_heads(source, tmp_path / "other.safetensors")
    assert new.read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_a_source_that_is_cut_while_it_is_read(source, tmp_path):
    path = shutil.copytree(source, tmp_path / "source", symlinks=True)
    with pytest.raises(ValueError, match=r"source: tensor \S+ cannot be read \("):
        convert(path, tmp_path / "new", progress=lambda done, total: os.truncate(path / "model-2.safetensors", 100))
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no full device")
def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        convert_writer.write({Path("/dev/full"): {"a": mx.zeros((9,))}}, lambda name, w: None)


ERRORS = KeyboardInterrupt(), OSError(28, "No space left on device"), SystemExit(143)


@pytest.mark.parametrize(("error", "share"), paired(ERRORS, [0.0, 0.5, 1.0]))
def test_an_interrupted_run_leaves_nothing(source, tmp_path, error, share):
    def stop(done, total):
        if done >= share * total:
            raise error

    for write, new in ((convert, tmp_path / "new"), (extract_heads, tmp_path / "new.safetensors")):
        with pytest.raises(type(error)):
            write(source, new, progress=stop)
        assert left(tmp_path) == []


def test_a_killed_run_leaves_what_the_next_one_replaces(source, tmp_path):
    """After any number of tensors the final directory does not exist, and the same command then succeeds."""
    code = """if True:
        import os, signal, sys
        from mlx_mtp.checkpoint.convert import convert
        counts = []
        def stop(done, total):
            counts.append(done)
            if len(counts) == 9:
                os.kill(os.getpid(), signal.SIGKILL)
        convert(sys.argv[1], sys.argv[2], progress=stop, shard_bytes=20_000)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(source), str(tmp_path / "new")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == ["new.partial"]
    partial = tmp_path / "new.partial"
    assert "not finished" in (partial / atomic.NOTE).read_text()
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"new: another run is writing it; wait until"):
        convert(source, tmp_path / "new")
    assert (partial / atomic.NOTE).exists()
    os.close(handle)
    convert(source, tmp_path / "new")
    assert left(tmp_path)[0] == "new"
    assert not partial.exists()
    assert not (tmp_path / "new" / atomic.NOTE).exists()
    assert mlx_mtp.load_model(tmp_path / "new").report.heads == 1


def test_a_foreign_directory_is_left_alone(source, tmp_path):
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"new\.partial: in the way, and not left by an earlier run; delete it"):
        convert(source, tmp_path / "new")
    assert left(tmp_path) == ["new.partial", "new.partial/thesis.txt"]
