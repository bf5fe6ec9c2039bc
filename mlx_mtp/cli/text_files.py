"""Find the text files in a path of the command line."""

from pathlib import Path


def text_files(path: Path) -> list[Path]:
    """Return [path] for a file; for a directory the files at any depth in it, sorted by path.

    Hidden files and directories in it, whose names begin with a dot, are left out; [] if there is no other file.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [f for f in files if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)]
