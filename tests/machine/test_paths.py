"""A path with an unknown user is refused in one line, wherever a path can be written."""

from pathlib import Path

import pytest

import mlx_mtp
from mlx_mtp.checkpoint.files import local
from mlx_mtp.checkpoint.gguf.cached import find_checkpoint, is_gguf
from mlx_mtp.checkpoint.pull import planned
from mlx_mtp.cli.chat_commands import named_file, named_files
from mlx_mtp.machine.paths import expanded

WRONG = "~no such user"
PACKAGE = Path(mlx_mtp.__file__).parent
READERS = {
    "expanded": expanded,
    "local": local,
    "is_gguf": lambda path: is_gguf(f"{path}.gguf"),
    "find_checkpoint": lambda path: find_checkpoint(f"{path}.gguf"),
    "planned": planned,
    "/save": lambda path: named_file(path, "/save"),
    "/load": lambda path: named_file(f"'{path}'", "/load"),
    "/image": lambda path: named_files(f"a.png '{path}'", "/image"),
}


def test_the_home_directory_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [expanded(path) for path in ("~/a", Path("~"), "a/~", "a")] == [
        tmp_path / "a",
        tmp_path,
        Path("a/~"),
        Path("a"),
    ]


@pytest.mark.parametrize("name", READERS)
def test_an_unknown_user_is_a_one_line_error_with_the_path(name):
    with pytest.raises(ValueError, match=f"^{WRONG}/x.*: {WRONG} is no known home directory") as caught:
        READERS[name](f"{WRONG}/x")
    assert "\n" not in str(caught.value)


def test_all_paths_are_expanded_by_the_same_function():
    """Except MLX_MTP_CACHE, whose callers continue without a cache."""
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if ".expanduser()" in p.read_text("utf-8")}
    assert found == {"machine/paths.py", "machine/remembered.py"}
