"""Load a small model as the drafter of a target that has the same tokens."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cache.arrays import rereads
from ..decoding.drafters import drafter_of
from ..decoding.drafters.small_model import SmallModel
from ..decoding.graph_memory import nbytes
from ..decoding.memory_needs import Budget
from ..models import drafter_kinds, find_family, find_port
from .build import load_port
from .files import read_config, read_header
from .load_made import load_made
from .report import quantization, size
from .sort_tensors import Drafting

NO_HEADS = Drafting(mtp=False, mtp_path=None, mtp_overrides={}, draft_model=None)
OF_DRAFTERS = re.compile(r"(model\.)?(fc\.weight|(.*\.)?hidden_norm\.weight|d2t)")  # tensors that no whole model has
EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|embd)\.weight")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")


def is_small_model(path: Path) -> bool:
    """Return whether a directory holds a whole model of a known family, and no drafter of another kind.

    False also if its config.json or a weight file cannot be read.
    """
    with suppress(ValueError, OSError, KeyError, TypeError, RecursionError):
        if find_family(config := read_config(path)) is None:
            return False
        names = read_header(sorted(path.glob("*.safetensors"))).keys()
        embedded = any(EMBEDDING.fullmatch(name) for name in names)
        foreign = any(OF_DRAFTERS.fullmatch(name) for name in names)
        return embedded and not foreign and all(kind.refuses(config, names) for kind in drafter_kinds())
    return False


def attach_small_model(model: Any, path: Path, budget: Budget, *, lazy: bool) -> None:
    """Load the model in a directory as the drafter of `model`, which is loaded; ValueError if it cannot draft.

    Its own MTP heads are not loaded. budget: memory to check for, unless `lazy`, with the small model's caches in the
    format `mtp_kv_bits`, not the target's.
    """
    config, bits = read_config(path), budget.layout.get("mtp_kv_bits")
    own = Budget(budget.context, budget.step, {"kv_bits": bits} if bits else {}, budget.ignore)
    if port := find_port(config):
        small = load_port(port, path, config, NO_HEADS, own, lazy=lazy)
    else:
        small = load_made(path, config, NO_HEADS, own, lazy=lazy)
    if rereads(small):
        raise ValueError(f"draft_model={path}: omit it; rejected drafts would stay in its layers' states")
    small.eval()
    model.drafter = SmallModel(small, model.vocab_size, path)
    model["drafter"] = small  # so that its parameters are among the model's
    facts = f"{size(nbytes(small.parameters()))}, {quantization(dict(small.named_modules()))}"
    source = f"none; drafts by {path}, {config['model_type']} of {len(small.layers)} layers, {facts}"
    model.runtime.note(source=source, declared=None, ignored=(*model.report.ignored, *small.report.ignored))


def instead_of_heads(drafting: Drafting) -> Drafting:
    """Return the options of a load without heads, for a target that a small model drafts for.

    ValueError for `mtp_overrides`, which needs heads.
    """
    if drafting.mtp_overrides:
        raise ValueError(f"mtp_overrides={drafting.mtp_overrides}: not together with a small model as draft_model")
    return NO_HEADS


def check_tokens(model: Any, path: Path, tokenizer: TokenizerWrapper | None, read: Callable[[Path], Any]) -> None:
    """Raise ValueError if the small model that drafts for `model`, loaded from `path`, has other tokens than `model`.

    Also if it has no tokenizer and the target's is given. tokenizer: the target's; None compares only if both
    directories have one. read: loads a directory's tokenizer. Without a small model nothing is checked.
    """
    if not isinstance(drafter := drafter_of(model), SmallModel):
        return
    assert drafter.path
    comparable = _has_tokenizer(drafter.path)
    if tokenizer is None and not (comparable and _has_tokenizer(path)):
        return
    if not comparable:
        raise ValueError(f"{drafter.path}: no usable tokenizer; a drafter's tokens are compared with the target's")
    tokenizers = tokenizer or read(path), read(drafter.path)
    if differing := first_difference(*map(_by_number, tokenizers)):
        number, (expected, found) = differing
        difference = f"token {number} is {found!r}, the target's {expected!r}"
        raise ValueError(f"{drafter.path}: a drafter needs the target's tokens; {difference}")


def first_difference(
    target: list[str | None], small: list[str | None]
) -> tuple[int, tuple[str | None, str | None]] | None:
    """Return (the first token id whose tokens differ, (the target's token, the small model's)), None if none differs.

    Tokens beyond the end of the shorter list are not compared.
    """
    pairs = enumerate(zip(target, small, strict=False))
    return next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), None)


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZERS)


def _by_number(tokenizer: TokenizerWrapper) -> list[str | None]:
    """Return a tokenizer's tokens by id; None for ids without a token."""
    vocab = tokenizer.get_vocab()
    tokens: list[str | None] = [None] * (max(vocab.values()) + 1)
    for token, number in vocab.items():
        tokens[number] = token
    return tokens
