"""Damaged prefix files never change or end a response, and remains of killed processes are removed."""

import fcntl
import os
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letters import Letters
from prefix_requests import LARGE, lines, prompts, restarted, serve, written
from prefix_requests import generate_two as generate
from sweep import SWEEP

from mlx_mtp.serve.prefix_files import PrefixFiles

pytestmark = pytest.mark.usefixtures("letters_as_tokenizer")


# What can become of a file.
def truncated(file):
    file.write_bytes(file.read_bytes()[:-9])


def emptied(file):
    file.write_bytes(b"")


def cut_within_the_header(file):
    file.write_bytes(file.read_bytes()[:100])


def changed_at_the_end(file):
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")


def changed_tokens(file):
    """Return a file with a well-formed header for other tokens."""
    file.write_bytes(
        re.sub(rb'(tokens\\":\[)(\d)', lambda m: m[1] + (b"2" if m[2] == b"1" else b"1"), file.read_bytes())
    )


def no_numbers(file):
    file.write_bytes(re.sub(rb'(primed\\":)\d', lambda m: m[1] + b"[", file.read_bytes()))


def other_shapes(file):
    """Replace a file by one with arrays of other shapes under the same names."""
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), {name: mx.contiguous(array[..., :1]) for name, array in arrays.items()}, metadata)


def a_copy_of_another(file):
    other = next(each for each in file.parent.iterdir() if each != file)
    shutil.copy(other, file)


def a_directory(file):
    file.unlink()
    file.mkdir()


DAMAGES = [truncated, emptied, cut_within_the_header, changed_at_the_end, changed_tokens, no_numbers, other_shapes]


@pytest.fixture(scope="module")
def stored(small, tmp_path_factory):
    """Return a directory with files of two prompts, the prompts, and the texts of a new server."""
    texts, directory = prompts(40), tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["mlx_mtp.generate"], "TokenizerWrapper", Letters)
        written(small, directory, *texts)
        return directory, texts, [generate(serve(small), text)[0] for text in texts]


@pytest.mark.parametrize("before", [True, False], ids=["before the start", "after the start"])
@pytest.mark.parametrize("damage", [*DAMAGES, a_copy_of_another])
def test_a_damaged_file_is_removed_with_one_log_line(small, stored, tmp_path, caplog, damage, before):
    (source, texts, fresh), directory = stored, tmp_path / "files"
    shutil.copytree(source, directory)
    started = None if before else restarted(small, directory)
    file = max(PrefixFiles(directory, LARGE).known.items(), key=lambda item: len(item[1]))[0]
    damage(file)
    served = started or restarted(small, directory)
    assert [generate(served, text)[0] for text in texts] == fresh
    assert len(lines(caplog)) == 1
    assert not file.exists()
    assert len(list(directory.iterdir())) == 1
    assert served.tree.covered(texts[1]) == 24


@pytest.mark.parametrize(("act", "count"), [(Path.unlink, 0), (a_directory, 1)])
def test_a_missing_or_unreadable_file_changes_no_response(small, stored, tmp_path, caplog, act, count):
    (source, texts, fresh), directory = stored, tmp_path / "files"
    shutil.copytree(source, directory)
    served = restarted(small, directory)
    act(max(served.files.known, key=lambda file: len(served.files.known[file])))
    assert [generate(served, text)[0] for text in texts] == fresh
    assert len(lines(caplog)) == count
    shutil.rmtree(directory)
    served.files.save(served.tree)
    assert len(restarted(small, directory).files.known) == 2


@settings(max_examples=300 if SWEEP else 6, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans(), st.booleans())
def test_a_changed_byte_never_changes_a_response(small, stored, tmp_path, place, flip, header, before):
    (source, texts, fresh), directory = stored, tmp_path / "files"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    started = None if before else restarted(small, directory)
    file = max(PrefixFiles(directory, LARGE).known.items(), key=lambda item: len(item[1]))[0]
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little") if header else len(content)
    content[int(place * length)] ^= flip
    file.write_bytes(content)
    assert generate(started or restarted(small, directory), texts[1])[0] == fresh[1]


def test_a_full_disk_causes_one_log_line_and_leaves_no_file(small, tmp_path, monkeypatch, caplog):
    served = serve(small, files=PrefixFiles(tmp_path, LARGE))
    generate(served, prompts(40)[0])
    for broken in ("fsync", "rename"):
        caplog.clear()

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, broken, full)
            served.files.save(served.tree)
        assert len(lines(caplog)) == 1
        assert "No space left" in lines(caplog)[0]
        assert not list(tmp_path.iterdir())
    served.files.save(served.tree)
    assert len(list(tmp_path.iterdir())) == 1


def leftovers(directory, name="0" * 32):
    """Create the unfinished files of a killed process, of this version and of earlier ones."""
    names = (f".{name}.prefix.safetensors-{'ab' * 16}.safetensors", f"{name}.prefix.safetensors.partial")
    files = [directory / each for each in names]
    for file in files:
        file.write_bytes(bytes(1000))
    return files


def test_only_unfinished_files_of_killed_processes_are_removed(tmp_path):
    old, new = leftovers(tmp_path)
    others = [tmp_path / name for name in ("notes.txt", "model.safetensors", "a.prefix.safetensors", ".hidden")]
    for file in others:
        file.write_bytes(b"mine")
    with new.open("rb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        PrefixFiles(tmp_path, 0)
        assert new.exists()
        assert not old.exists()
    PrefixFiles(tmp_path, 0)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_file_that_another_server_is_writing_stays_and_counts(small, tmp_path, small_pieces):
    """One of two servers starts and stores a prompt while the other is writing a file in the same directory."""
    first, second = prompts(40)
    one = serve(small, files=PrefixFiles(tmp_path, LARGE))
    generate(one, first, turns=(18,))
    assert all(one.files.step(one.tree) for _ in range(5))
    (partial,) = tmp_path.iterdir()
    other = restarted(small, tmp_path)
    generate(other, second)
    other.files.save(other.tree)
    (whole,) = other.files.known
    other.files.limit = whole.stat().st_size + partial.stat().st_size - 1
    other.files.save(other.tree)
    assert not whole.exists()
    one.files.save(one.tree)
    assert generate(other, first)[1] == 20  # from the file that the first server wrote meanwhile
    assert not partial.exists()
    one.files.limit = 0
    one.files.save(one.tree)
    assert generate(other, [*first, 1])[1] == 20
    assert generate(restarted(small, tmp_path), first)[1] == 0
