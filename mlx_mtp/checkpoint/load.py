"""Load a checkpoint with its MTP heads: from a directory or a name on the hub to (model, tokenizer).

mlx-lm's `load_model` does the trunk and all quantization formats; here: finding the heads by their tensors, errors
that name what is wrong, and what is tried once the weights are there.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.graph_memory import nbytes
from ..decoding.memory_needs import Budget
from ..layers.shared_rope import share_angles
from ..machine.errors import one_line
from ..models import find_port
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .build import load_port
from .draft_vocab import DraftVocab, reduce_heads
from .draft_vocab import read as read_vocab
from .files import read_config, read_header, resolve
from .head_self_test import WORDS, self_test
from .mlx_lm_model import load_plain
from .sort_tensors import Drafting

WEIGHTS_ALONE = Budget()


def load(
    path_or_hf_repo: str | Path,
    *,
    mtp: bool = True,
    mtp_path: str | Path | None = None,
    mtp_overrides: dict[str, Any] | None = None,
    draft_model: str | Path | None = None,
    draft_vocab: str | Path | Sequence[int] | None = None,
    revision: str | None = None,
    lazy: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    kernels: str | None = None,
    budget: Budget = WEIGHTS_ALONE,
) -> tuple[Any, TokenizerWrapper]:
    """Load a checkpoint with its MTP heads; returns (model, tokenizer).

    mtp: False neither loads nor allocates the heads.
    mtp_path: file or directory to take the heads from, instead of the checkpoint's own.
    mtp_overrides: values of MTPSpec's topology, capture, feedback, fuse and head to use in place of the family's,
        for an A/B of what only trained weights can settle.
    draft_model: directory or hub name of a drafter (EAGLE-3) to draft with, instead of heads of the checkpoint's.
    draft_vocab: file of `mlx-mtp draft-vocab`, or token ids, that the heads choose their drafts from.
    revision: branch, tag or commit on the hub.
    lazy: leave weights on disk until they are used; the heads are then not searched for NaN and zeros, and no
        kernel is on by trial.
    tokenizer_config, adapter_path: as mlx-lm's (LoRA adapters change the target, not its heads).
    kernels: "off", "exact" or "fast" Metal kernels in place of MLX's own ("fast" has products by matrices, too,
        whose bits are not MLX's); None is MLX_MTP_KERNELS, and where that is not set those that a trial here finds
        right and faster.
    budget: what there must be memory for, before any weight is read.
    Raises ValueError, in one line, for a checkpoint that is damaged, of an unknown kind, or too large.
    """
    lane, vocab = requested(kernels), _read_vocab(draft_vocab, mtp=mtp)
    path = resolve(path_or_hf_repo, revision)
    model = _load(path, Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model), budget, lazy=lazy)
    if adapter_path is not None:
        model = _adapted(model, adapter_path)
    tokenizer = load_tokenizer(path, tokenizer_config)
    unknown = sum(token >= model.vocab_size for token in tokenizer.get_vocab().values())
    if unknown > model.vocab_size // 100:  # a few more are usual
        warnings.warn(f"{path}: the model has no embedding for {unknown} tokens of the tokenizer", stacklevel=2)
    _finish(model, path, vocab, tokenizer, lane, lazy=lazy)
    return model, tokenizer


def load_model(
    path: str | Path,
    *,
    mtp: bool = True,
    mtp_path: str | Path | None = None,
    mtp_overrides: dict[str, Any] | None = None,
    draft_model: str | Path | None = None,
    draft_vocab: str | Path | Sequence[int] | None = None,
    lazy: bool = False,
    kernels: str | None = None,
    budget: Budget = WEIGHTS_ALONE,
) -> Any:
    """Do as `load` for the model alone, from a local directory; a draft vocabulary's tokenizer is not checked."""
    lane, vocab = requested(kernels), _read_vocab(draft_vocab, mtp=mtp)
    model = _load(resolve(path), Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model), budget, lazy=lazy)
    _finish(model, Path(path), vocab, None, lane, lazy=lazy)
    return model


def load_tokenizer(path: Path, tokenizer_config: dict[str, Any] | None = None) -> TokenizerWrapper:
    """Load the tokenizer of a checkpoint's directory, with config.json's stop tokens; ValueError where it is none."""
    with one_line(f"{path}: no usable tokenizer"):
        eos = read_config(path).get("eos_token_id")
        tokenizer = mlx_lm_utils.load_tokenizer(path, tokenizer_config, eos_token_ids=eos)
        if not tokenizer.get_vocab():  # what transformers makes of a file that it does not find
            raise ValueError("it has no tokens")
    return tokenizer


def _read_vocab(draft_vocab: Any, *, mtp: bool) -> DraftVocab | None:
    if draft_vocab is not None and not mtp:
        raise ValueError(f"draft_vocab={draft_vocab}: not together with mtp=False")
    return None if draft_vocab is None else read_vocab(draft_vocab)


def _load(path: Path, drafting: Drafting, budget: Budget, *, lazy: bool) -> Any:
    config = read_config(path)
    drafting.check()
    port = find_port(config)
    if port is None:
        return load_plain(path, config, drafting, budget, lazy=lazy)
    model = load_port(port, path, config, drafting, budget, lazy=lazy)
    if mx.default_device() == mx.cpu:
        share_angles(model)
    if drafting.heads and not model.mtp:
        warnings.warn(f"{path}: no MTP heads found ({model.report.source}); decoding plainly", stacklevel=4)
    return model


def _adapted(model: Any, adapter_path: str) -> Any:
    if not (Path(adapter_path) / "adapter_config.json").is_file():
        raise ValueError(f"adapter_path={adapter_path}: no adapter_config.json in it")
    with one_line(f"{adapter_path}: no usable adapters"):
        read_header([Path(adapter_path) / "adapters.safetensors"])
        model = mlx_lm_utils.load_adapters(model, adapter_path)
    model.eval()
    return model


def _finish(
    model: Any, path: Path, vocab: DraftVocab | None, tokenizer: Any, lane: str | None, *, lazy: bool
) -> None:
    """Test the first head, reduce the draft vocabulary, switch kernels on; the report notes what came of it."""
    if not lazy:
        self_test(model, path, {"words": tokenizer.encode(WORDS)} if tokenizer is not None else {})
    if vocab is not None:
        _reduce(model, vocab, tokenizer, lazy=lazy)
    kernels, not_exact = switch_on(model, lane, lazy=lazy)
    model.report = replace(model.report, kernels=kernels, not_exact=not_exact)


def _reduce(model: Any, vocab: DraftVocab, tokenizer: Any, *, lazy: bool) -> None:
    """Let the heads draft from the listed tokens alone, and note in the report what that saves."""
    if not model.mtp:
        raise ValueError(f"draft_vocab={vocab.source}: the model has no heads that draft; allowed is None")
    vocab.check(model.vocab_size, tokenizer)
    rows, before = reduce_heads(model, vocab.tokens), model.report.head_bytes
    after = nbytes(model.mtp)
    model.report = replace(model.report, head_bytes=after, drafted_from=rows, saved_bytes=before - after)
    if not lazy:
        mx.eval([head.parameters() for head in model.mtp])  # lets go of the rows that are not listed
