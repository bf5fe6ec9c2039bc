"""Remember what kernel trials found, for the next load of this model on this machine."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .._version import __version__
from ..kernels import _source
from ..kernels.contraction import AS_COMPILED, SPELLINGS, spelling
from ..machine.remembered import RememberedFile, machine

MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]
Key = tuple[str, str, int]  # op, shape, rows


class Found(NamedTuple):
    """The finding of a kernel trial: why the kernel is wrong, or stock MLX's time over its own.

    Where it is right and was not timed, `wrong` is "". spelling: of its multiply-adds, see `kernels/contraction.h`.
    split: whether this is of the kernel with the rows split, because it is faster or the other one fails.
    """

    wrong: str | None
    ratio: float | None
    spelling: str = AS_COMPILED
    split: bool = False


class RememberedVerdicts:
    """The findings of one model on one machine, with this MLX and these kernels.

    model: a fingerprint of the model's shapes, as the caller makes it.
    """

    def __init__(self, model: str):
        facts = {**machine(), "mlx": MLX_VERSION, "mlx_mtp": __version__, "kernels": _kernels(), "model": model}
        self._file = RememberedFile("trials", facts, "what kernels are faster cannot be kept for the next load")
        self._found: dict[Key, Found] = {}

    def recall(self) -> dict[Key, Found]:
        """Read all findings; where there is no whole file that this machine, model, MLX and kernels wrote, those of
        this process.
        """
        try:
            kept = self._file.recall()
            spellings = kept.get("spellings", {})
            found = dict(map(_parsed, kept["found"]))
            return {key: f._replace(spelling=_spelling(spellings, key[0])) for key, f in found.items()} | self._found
        except (ValueError, LookupError, TypeError, AttributeError):
            return self._found

    def keep(self, found: Mapping[Key, Found]) -> None:
        """Replace what was kept, without findings of a spelling that their op has given up.

        Where it cannot be written, warn, but only the first time.
        """
        self._found = {key: f for key, f in found.items() if f.spelling == spelling(key[0])}
        spellings = {op: f.spelling for (op, *_), f in self._found.items() if f.spelling != AS_COMPILED}
        self._file.keep(
            found=[[*key, f.wrong, f.ratio, f.split] for key, f in self._found.items()], spellings=spellings
        )

    def add(self, found: Mapping[Key, Found]) -> None:
        """Keep more findings, if there are any, beside those that are kept."""
        if found:
            self.keep({**self.recall(), **found})


def _parsed(entry: list) -> tuple[Key, Found]:
    """Read one line of the file; ValueError where this module cannot have written it."""
    op, shape, rows, wrong, ratio, split = entry
    timed = wrong is None and isinstance(ratio, float) and 0 < ratio < math.inf
    found = timed or (isinstance(wrong, str) and ratio is None)
    if not (isinstance(op, str) and isinstance(shape, str) and type(rows) is int and type(split) is bool and found):
        raise ValueError(entry)
    return (op, shape, rows), Found(wrong, ratio, split=split)


def _spelling(spellings: dict[str, str], op: str) -> str:
    """Read how an op's multiply-adds were spelled; ValueError where this module cannot have written it."""
    if (found := spellings.get(op, AS_COMPILED)) not in SPELLINGS:
        raise ValueError(found)
    return found


def _kernels() -> str:
    """Hash the kernels' sources, and the code that launches them."""
    digest, parts = hashlib.sha256(), ((_source.DIRECTORY, "**/*"), (Path(_source.__file__).parent, "*.py"))
    files = [(p.relative_to(root), p) for root, pattern in parts for p in root.glob(pattern) if p.is_file()]
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
