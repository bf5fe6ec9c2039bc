"""Keep remembered beginnings of prompts in files, so that they outlive the server."""

import hashlib
import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from ..cache.file import load_prompt_cache, save_prompt_cache, saved_tokens
from ..machine.errors import first_line
from .prefixes import PrefixTree, resumable

log = logging.getLogger("mlx_mtp.serve")
ENDING = ".prefix.safetensors"


class PrefixFiles:
    """Prompt caches in a directory, by the tokens that they hold; those not used for longest are removed.

    limit: most bytes of all.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        directory.mkdir(parents=True, exist_ok=True)
        self.known: dict[Path, list[int]] = {}
        for file in directory.glob(f"*{ENDING}"):
            try:
                self.known[file] = saved_tokens(file)
            except (ValueError, OSError) as e:
                log.warning("not used: %s", first_line(e))

    def load(self, tree: PrefixTree, tokens: Sequence[int]) -> None:
        """Put into the tree what a file holds of the beginning of `tokens`, if that is more than the tree has."""
        held, ends = tree.covered(tokens), set(tree.chunking.cuts(tokens))
        fitting = [f for f, own in self.known.items() if held < len(own) in ends and own == tokens[: len(own)]]
        fitting = [f for f in fitting if f == self._file(tree, self.known[f])]
        if not fitting:
            return
        file = max(fitting, key=lambda f: len(self.known[f]))
        try:
            tree.insert(load_prompt_cache(file, tree.blank.model))
            file.touch()
        except (ValueError, OSError) as e:
            log.warning("not used: %s", first_line(e))
            del self.known[file]

    def save(self, tree: PrefixTree, until: float = float("inf")) -> None:
        """Write the texts of a tree, the newest first, as long as time.monotonic() is not past `until`."""
        for chunk in sorted(tree.leaves(rests=False), key=lambda c: -c.used):
            path = resumable(chunk.path())
            tokens = [token for each in path for token in each.tokens]
            file = self._file(tree, tokens)
            if not path or file in self.known:
                continue
            if time.monotonic() > until:
                log.warning("the time to end is over: not every remembered prompt was written to %s", self.directory)
                break
            try:
                save_prompt_cache(file, tree.joined(path, len(tokens)))
            except OSError as e:
                log.warning("%s", first_line(e))
                break
            for shorter, own in [*self.known.items()]:
                if (
                    len(own) < len(tokens) and own == tokens[: len(own)]
                ):  # it holds no more than the beginning of this one
                    self._remove(shorter)
            self.known[file] = tokens
        self._shrink()

    def _file(self, tree: PrefixTree, tokens: Sequence[int]) -> Path:
        """Name the file of a text, by all that its bits depend on beside the model."""
        step, least, ends = tree.chunking
        made = (step, least, sorted(ends), version("mlx"), str(mx.default_device()), [*tokens])
        return self.directory / f"{hashlib.sha256(repr(made).encode()).hexdigest()[:32]}{ENDING}"

    def _shrink(self) -> None:
        files = sorted((f for f in self.known if f.exists()), key=lambda f: f.stat().st_mtime)
        size = sum(file.stat().st_size for file in files)
        for file in files:
            if size <= self.limit:
                break
            size -= file.stat().st_size
            self._remove(file)

    def _remove(self, file: Path) -> None:
        del self.known[file]
        file.unlink(missing_ok=True)
