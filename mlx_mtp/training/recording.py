"""Store a target's hidden states and most likely tokens on many documents on disk, one document at a time.

A recording is a directory. `about.json` contains facts on target and text, `documents.jsonl` a line for each complete
document, and `rows.bin` and `tokens.bin` a row for each token. Rows after the last complete document, which an
interruption left, are overwritten.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..machine.atomic import check_free, write_whole
from ..machine.errors import naming, one_line

FORMAT = 1
OTHER = "choose another name for the heads (--out)"
ABOUT, DOCUMENTS, ROWS, TOKENS = "about.json", "documents.jsonl", "rows.bin", "tokens.bin"


@dataclass(frozen=True)
class Document:
    """A document of a recording; numbers are indices of tokens in the whole recording.

    first, end: its first token, and the one after its last. answer: the first token of its answer: `first` without a
    prompt, `end` without an answer. held: whether it measures the heads instead of training them.
    """

    first: int
    end: int
    answer: int
    held: bool


class Recording:
    """The recorded documents of one target in the directory `path`, which is created if it is missing.

    about: JSON facts on target and text. width: values in a hidden row, stored as float16. documents: the complete
    ones. ValueError for a damaged recording, one with other facts or another width, and a directory that has files
    and is no recording.
    """

    def __init__(self, path: Path, about: dict[str, Any], width: int):
        self.path, self.width = path, width
        self.documents: list[Document] = []
        with naming(path):
            path.mkdir(parents=True, exist_ok=True)
            self._open(about | {"format": FORMAT, "width": width})

    def _open(self, about: dict[str, Any]) -> None:
        file = self.path / ABOUT
        if not file.exists():
            if any(self.path.iterdir()):
                raise ValueError(f"{self.path}: not a recording of mlx-mtp tune-heads, and not empty; {OTHER}")
            write_whole(file, json.dumps(about))
        with one_line(f"{self.path}: a damaged recording; delete it", (ValueError, TypeError, KeyError)):
            found = json.loads(file.read_text())
            text = (self.path / DOCUMENTS).read_text() if (self.path / DOCUMENTS).exists() else ""
            whole, _, rest = text.rpartition("\n")
            documents = [Document(**json.loads(line)) for line in whole.splitlines()]
            self._check_sizes(documents[-1].end if documents else 0)
        if changed := sorted(name for name in about | found if found.get(name) != about.get(name)):
            raise ValueError(f"{self.path}: recorded with another {', '.join(changed)}; delete it, or {OTHER}")
        if rest:  # of a line whose write an interruption or a full disk cut
            write_whole(self.path / DOCUMENTS, whole and whole + "\n")
        self.documents = documents

    def _check_sizes(self, tokens: int) -> None:
        """Raise ValueError if a file has fewer than `tokens` rows."""
        for name, width in ((ROWS, 2 * self.width), (TOKENS, 8)):
            file = self.path / name
            if tokens and (not file.exists() or file.stat().st_size < tokens * width):
                raise ValueError(f"{name} is too short")

    @property
    def size(self) -> int:
        """The number of recorded tokens."""
        return self.documents[-1].end if self.documents else 0

    def check_room(self, tokens: int) -> None:
        """Raise ValueError if the disk has no room for `tokens` tokens in all; those recorded already need none."""
        check_free(self.path / ROWS, max(0, tokens - self.size) * bytes_per_token(self.width))

    def append(self, tokens: list[int], hidden: mx.array, choices: mx.array, answer: int, *, held: bool) -> None:
        """Append a document of n tokens: its hidden rows [n, width] and the target's choice after each, int32 [n].

        answer: the number of tokens before the answer. held: as in `Document`. ValueError for rows that are not
        finite in float16; OSError if the disk is full.
        """
        rows = np.array(hidden.astype(mx.float16))
        if not np.isfinite(rows).all():
            raise ValueError(
                "the target's hidden states for a document contain NaN, or values that float16 cannot hold; "
                "heads cannot be trained on them"
            )
        pairs = np.stack([np.array(tokens, np.int32), np.array(choices, np.int32)], axis=1)
        document = Document(self.size, self.size + len(tokens), self.size + answer, held)
        with naming(self.path):
            _write_at(self.path / ROWS, self.size * rows.itemsize * self.width, rows)
            _write_at(self.path / TOKENS, self.size * 8, pairs)
            with (self.path / DOCUMENTS).open("a") as f:
                f.write(json.dumps(asdict(document)) + "\n")
        self.documents.append(document)

    def hold_last(self, count: int) -> None:
        """Hold out the last `count` documents and no others, also in the file."""
        first = len(self.documents) - count
        self.documents = [replace(document, held=i >= first) for i, document in enumerate(self.documents)]
        write_whole(self.path / DOCUMENTS, "".join(json.dumps(asdict(d)) + "\n" for d in self.documents))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return read-only memory maps of all tokens: hidden rows, float16 [size, width], and int32 [size, 2].

        The columns of the int32 array are the token, and the target's most likely token after it. There must be a
        document.
        """
        shape = self.size, self.width
        rows = np.memmap(self.path / ROWS, np.float16, "r", shape=shape)
        return rows, np.memmap(self.path / TOKENS, np.int32, "r", shape=(self.size, 2))


def bytes_per_token(width: int) -> int:
    """Return the bytes that a recording needs for each token with hidden rows of `width` values."""
    return 2 * width + 8


def _write_at(file: Path, offset: int, array: np.ndarray) -> None:
    with file.open("r+b" if file.exists() else "w+b") as f:
        f.seek(offset)
        f.write(array.tobytes())
        f.flush()
