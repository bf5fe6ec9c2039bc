"""Check that only errors of a full disk name the file that was being written."""

import errno
import os

import pytest

from mlx_mtp.bench import result
from mlx_mtp.checkpoint import draft_vocab
from mlx_mtp.machine import atomic, remembered
from mlx_mtp.machine.errors import naming

FULL = "/dev/full"


def test_a_disk_full_error_names_the_file(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    for kind in (atomic.file, atomic.directory):
        with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / 'new'}'$"), kind(tmp_path / "new"):
            raise OSError(*full.args)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="'inner'"), naming("outer"), naming("inner"):
        raise full
    with pytest.raises(TimeoutError) as caught, naming("outer"):
        raise TimeoutError(errno.ETIMEDOUT, "the hub")
    assert caught.value.filename is None


@pytest.mark.skipif(not os.path.exists(FULL), reason="has no full device")
def test_small_files_name_a_full_disk(monkeypatch):
    monkeypatch.setattr(draft_vocab, "digest", lambda tokenizer: "0")
    for write in (
        lambda: atomic.write_whole(FULL, "x"),
        lambda: result.write({"bench": "x"}, FULL),
        lambda: draft_vocab.write(FULL, [1], 2, None),
    ):
        with pytest.raises(OSError, match=f"No space left on device: '{FULL}'$"):
            write()


def test_a_full_disk_warns_with_the_name_of_the_figures_file(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    kept = remembered.RememberedFile("costs", {"fact": 1}, "figures are lost")
    with pytest.warns(UserWarning, match=r"figures are lost \(.*No space left on device: '.*costs/.*\.json'\)"):
        kept.keep(figure=1)
