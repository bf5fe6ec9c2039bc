"""Find the files of texts that a command is given."""

from pathlib import Path


def text_files(path: Path) -> list[Path]:
    """Return the file itself, or, sorted, all files at any depth of a directory that have no hidden part below it."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [f for f in files if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)]
