"""Modify prompt cache files and keep their checksums right."""

import json
import struct
from pathlib import Path

from mlx_mtp.cache import file as cache_file


def rewritten(content: bytes, change) -> bytes:
    """Return a file with a modified state and no checksum; `sealed` adds the right one."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    state = json.loads(header["__metadata__"]["mlx_mtp"])
    change(state)
    header["__metadata__"] = {"checksum": cache_file.BLANK, "mlx_mtp": json.dumps(state)}
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def sealed(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    with file.open("r+b") as f:
        place, digest = cache_file._checksum(f)
        f.seek(place)
        f.write(digest.encode())
    return file
