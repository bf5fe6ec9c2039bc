"""Files that a reader finds whole or not at all."""

import os
import threading
from pathlib import Path


def write_whole(file: str | Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, in its directory or one that is made: all of it or nothing.

    What is no file, a pipe or a terminal, which nothing can take the place of, is written into.
    """
    path = Path(file).resolve()
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
