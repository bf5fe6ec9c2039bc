"""Load a checkpoint with its MTP heads: from a directory or a name on the hub to (model, tokenizer).

mlx-lm's `load_model` does the trunk and all quantization formats; here: finding the heads by their tensors, errors
that name what is wrong, and what is tried once the weights are there. A family without a port is mlx-lm's own model
and caches in the same loop, without drafts.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.graph_memory import nbytes
from ..decoding.memory_needs import Budget
from ..decoding.prefill import test_heads
from ..decoding.prefill_chunk import prefill_chunk
from ..layers.expert_rows import cut_experts, number_rows
from ..layers.shared_rope import share_angles
from ..machine.errors import one_line
from ..machine.stream import in_turn
from ..machine.wired import AUTO, WiredLimit, check_wired_limit, wire
from ..models import find_port
from ..ranks.group import Ranks, ranks_of
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .adapters import load_adapters as _adapted
from .build import load_port
from .draft_vocab import DraftVocab, reduce_heads
from .draft_vocab import read as read_vocab
from .files import read_config, resolve
from .gguf.cached import find_checkpoint, find_heads
from .head_self_test import FEW_TOKENS, WORDS, is_large, random_tokens, self_test
from .heads_beside import is_split
from .load_plain import load_plain
from .sort_tensors import Drafting

WEIGHTS_ALONE = Budget()


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    mtp: bool = True,
    mtp_path: str | Path | None = None,
    mtp_overrides: dict[str, Any] | None = None,
    draft_model: str | Path | None = None,
    draft_vocab: str | Path | Sequence[int] | None = None,
    kernels: str | None = None,
    budget: Budget = WEIGHTS_ALONE,
    wired_limit: WiredLimit = AUTO,
    tensor_group: mx.distributed.Group | None = None,
) -> Any:
    """Load a checkpoint with its MTP heads, in mlx_lm's way; returns (model, tokenizer), or (.., .., config).

    On a CPU the heads of a large model are read, checked and tested before they first draft.
    Any thread may load, when it is its turn, and any may use what has been loaded.
    A GGUF file, also one of heads as `mtp_path`, is transcoded once into the user's cache folder.

    tokenizer_config, adapter_path: as mlx-lm's (LoRA adapters, PEFT's too, change the target, not its heads).
    model_config: values to use in place of config.json's. return_config: return what then was used, too.
    revision: branch, tag or commit on the hub. trust_remote_code: let the tokenizer run code of the checkpoint.
    lazy: leave weights on disk until they are used; the heads are then not searched for NaN and zeros, and no
        kernel is on by trial.
    mtp: False neither loads nor allocates the heads.
    mtp_path: file or directory to take the heads from, the released checkpoint's too, instead of its own.
    mtp_overrides: values of MTPSpec's topology, capture, feedback, fuse and head to use in place of the family's,
        for an A/B of what only trained weights can settle.
    draft_model: directory or hub name of a drafter to draft with, instead of heads of the checkpoint's: EAGLE-3,
        DFlash, DFlash2, DSpark, or MTP heads that mlx-vlm split off.
    draft_vocab: file of `mlx-mtp draft-vocab`, or token ids, that the heads choose their drafts from.
    kernels: "off", "exact" or "fast" Metal kernels in place of MLX's own ("fast" has products by matrices, too,
        whose bits are not MLX's); None is MLX_MTP_KERNELS, and where that is not set those that a trial here finds
        right and faster.
    budget: what there must be memory for, before any weight is read.
    wired_limit: bytes that the GPU keeps resident, for the process; "auto" sets it only for a model that needs most
        of the recommended working set, "off" never. A later load never lowers it.
    tensor_group: of `mx.distributed.init()`: the target is split over its ranks, all of which have to load it, and
        from then on generate together, each with the same calls; heads are whole on each. Not with adapters.
    Raises ValueError, in one line, for a checkpoint that is damaged, of an unknown kind, or too large.
    """
    drafting, shared = Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model), (budget, wired_limit, tensor_group)
    options = _checked(drafting, draft_vocab, kernels, *shared, lazy=lazy, adapter_path=adapter_path)
    path = find_checkpoint(path_or_hf_repo, revision, code=trust_remote_code)
    with in_turn():
        config = read_config(path, model_config)
        model = _load(path, config, options)
        tokenizer = _tokenizer_for(model, path, tokenizer_config, config, code=trust_remote_code)
        _finish(model, path, tokenizer, options)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


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
    wired_limit: WiredLimit = AUTO,
    tensor_group: mx.distributed.Group | None = None,
) -> Any:
    """Do as `load` for the model alone, from a local path; a draft vocabulary's tokenizer is not checked."""
    drafting = Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model)
    options = _checked(drafting, draft_vocab, kernels, budget, wired_limit, tensor_group, lazy=lazy)
    path = find_checkpoint(path)
    with in_turn():
        model = _load(path, read_config(path), options)
        _finish(model, path, None, options)
    return model


class Options(NamedTuple):
    """Options of a load, checked before any file is read.

    vocab: tokens that the heads draft from. lane: of kernels, as `switch_on` takes it.
    """

    drafting: Drafting
    vocab: DraftVocab | None
    lane: str | None
    budget: Budget
    wired: WiredLimit
    ranks: Ranks | None
    lazy: bool
    adapter_path: str | None


def _checked(
    drafting: Drafting,
    draft_vocab: Any,
    kernels: str | None,
    budget: Budget,
    wired_limit: WiredLimit,
    group: Any,
    *,
    lazy: bool,
    adapter_path: str | None = None,
) -> Options:
    """Check what can be without the checkpoint; ValueError for what is not allowed."""
    check_wired_limit(wired_limit)
    lane, vocab, ranks = requested(kernels), _read_vocab(draft_vocab, mtp=drafting.mtp), ranks_of(group)
    if ranks and adapter_path is not None:
        raise ValueError(f"adapter_path={adapter_path}: not on {ranks.size} ranks; fuse the adapters first")
    return Options(drafting, vocab, lane, budget, wired_limit, ranks, lazy, adapter_path)


def load_tokenizer(
    path: Path, tokenizer_config: dict[str, Any] | None = None, config: dict | None = None
) -> TokenizerWrapper:
    """Load the tokenizer of a checkpoint's directory, with the stop tokens of `config` (None: of config.json);
    ValueError where it is none."""
    with one_line(f"{path}: no usable tokenizer"):
        eos = (read_config(path) if config is None else config).get("eos_token_id")
        tokenizer = mlx_lm_utils.load_tokenizer(path, tokenizer_config, eos_token_ids=eos)
        if not tokenizer.get_vocab():  # what transformers makes of a file that it does not find
            raise ValueError("it has no tokens")
    return tokenizer


def _read_vocab(draft_vocab: Any, *, mtp: bool) -> DraftVocab | None:
    if draft_vocab is not None and not mtp:
        raise ValueError(f"draft_vocab={draft_vocab}: not together with mtp=False")
    return None if draft_vocab is None else read_vocab(draft_vocab)


def _tokenizer_for(
    model: Any, path: Path, tokenizer_config: dict[str, Any] | None, config: dict, *, code: bool
) -> TokenizerWrapper:
    """Load the tokenizer of a model; warn of many tokens that the model has no embedding for."""
    trusted = {"trust_remote_code": True} if code else {}
    tokenizer = load_tokenizer(path, trusted | (tokenizer_config or {}), config)
    unknown = sum(token >= model.vocab_size for token in tokenizer.get_vocab().values())
    if unknown > model.vocab_size // 100:  # a few more are usual
        warnings.warn(f"{path}: the model has no embedding for {unknown} tokens of the tokenizer", stacklevel=3)
    return tokenizer


def _load(path: Path, config: dict, options: Options) -> Any:
    """Load the model, with its heads and adapters, as the checkpoint has them."""
    drafting, budget, ranks, lazy = options.drafting, options.budget, options.ranks, options.lazy
    drafting.check()
    drafting = replace(drafting, mtp_path=find_heads(drafting.mtp_path, path))
    if program := config.get("model_file"):
        raise ValueError(f"{path}/config.json: model_file={program}: mlx_mtp runs no checkpoint's own model code")
    port = find_port(config)
    if port is None:
        if ranks:
            raise ValueError(f"ranks={ranks.size}: model_type {config['model_type']!r} has no port; allowed is 1")
        model = load_plain(path, config, drafting, budget, lazy=lazy)
    else:
        if drafting.draft_model is not None and is_split(drafter := resolve(drafting.draft_model)):
            drafting = replace(drafting, draft_model=None, mtp_path=drafter)
        model = load_port(port, path, config, drafting, budget, ranks, lazy=lazy)
        if mx.default_device() == mx.cpu:
            share_angles(model)
        cut_experts(model)
        number_rows(model.modules())
        if drafting.heads and not model.mtp:
            warnings.warn(f"{path}: no MTP heads found ({model.report.source}); decoding plainly", stacklevel=4)
    return model if options.adapter_path is None else _adapted(model, options.adapter_path)


def _finish(model: Any, path: Path, tokenizer: Any, options: Options) -> None:
    """Test the first head, reduce the draft vocabulary, switch kernels on, wire the weights and choose the prefill
    chunk; the report notes what came of it."""
    vocab, layout, lazy = options.vocab, options.budget.layout, options.lazy
    if not lazy:
        _test_or_defer(model, path, tokenizer, defer=vocab is None and is_large(model))
    if vocab is not None:
        _reduce(model, vocab, tokenizer, lazy=lazy)
    bits = {bits for name in ("kv_bits", "mtp_kv_bits") if (bits := layout.get(name))}
    kernels, not_exact = switch_on(model, options.lane, lazy=lazy, **({"kv_bits": bits} if bits else {}))
    model.runtime.note(kernels=kernels, not_exact=not_exact)
    wire(nbytes(model.parameters()), options.wired)
    model.runtime.note(prefill_chunk=prefill_chunk(model, layout, lazy=lazy))


def _test_or_defer(model: Any, path: Path, tokenizer: Any, *, defer: bool) -> None:
    """Read and test the heads, now or before they first draft."""
    texts = {"random tokens": random_tokens(model.vocab_size)}
    if tokenizer is not None:
        texts["words"] = tokenizer.encode(WORDS)
    if defer:
        texts = {kind: tokens[:FEW_TOKENS] for kind, tokens in texts.items()}
    model.runtime.untested = partial(_test_heads, model, model.runtime.untested, path, texts)
    model.runtime.note(untested=defer and bool(model.mtp))
    if not defer:
        test_heads(model)
        mx.eval(model.parameters())


def _test_heads(model: Any, read: Callable[[], None] | None, path: Path, texts: dict[str, list[int]]) -> None:
    if read is not None:
        read()
    self_test(model, path, texts)
    model.runtime.note(untested=False)


def _reduce(model: Any, vocab: DraftVocab, tokenizer: Any, *, lazy: bool) -> None:
    """Let the heads draft from the listed tokens alone, and note in the report what that saves."""
    if not model.mtp:
        raise ValueError(f"draft_vocab={vocab.source}: the model has no heads that draft; allowed is None")
    vocab.check(model.vocab_size, tokenizer)
    rows, before = reduce_heads(model, vocab.tokens), model.report.head_bytes
    after = nbytes(model.mtp)
    model.runtime.note(head_bytes=after, drafted_from=rows, saved_bytes=before - after)
    if not lazy:
        mx.eval([head.parameters() for head in model.mtp])  # lets go of the rows that are not listed
