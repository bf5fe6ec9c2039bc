"""Load a checkpoint with its MTP heads: from a directory or a name on the hub to (model, tokenizer).

mlx-lm's `load_model` does the trunk and all quantization formats; here: finding the heads by their tensors, errors
that name what is wrong, and what is tried once the weights are there. A family without a port is mlx-lm's own model
and caches in the same loop, without drafts.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cache.layer_cache import CacheKind
from ..cache.mlx_lm_caches import MlxLmCaches
from ..decoding.graph_memory import nbytes
from ..decoding.memory_needs import Budget
from ..decoding.prefill import test_heads
from ..decoding.prefill_chunk import prefill_chunk
from ..layers.expert_rows import cut_experts, number_rows
from ..layers.shared_rope import share_angles
from ..machine.errors import one_line
from ..machine.stream import in_turn
from ..machine.wired import AUTO, WiredLimit, check_wired_limit, wire
from ..models import find_port, port_names
from ..models.config.normalize import normalize
from ..models.config.rope_modules import apply_rope
from ..ranks.group import Ranks, ranks_of
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .adapters import load_adapters as _adapted
from .build import load_port
from .draft_vocab import DraftVocab, reduce_heads
from .draft_vocab import read as read_vocab
from .files import read_config, read_tensors, resolve, weights_apart
from .gguf.cached import find_checkpoint, find_heads
from .head_self_test import FEW_TOKENS, WORDS, is_large, random_tokens, self_test
from .heads_beside import is_split
from .parameters import check_numbers, named
from .quant_methods import packed_by
from .report import make_report
from .sort_tensors import Drafting
from .weight_files import Stored, read_stored

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
    draft_model: directory or hub name of a drafter to draft with, instead of heads of the checkpoint's: EAGLE-3, or
        MTP heads that mlx-vlm split off.
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
    check_wired_limit(wired_limit)
    lane, vocab, ranks = requested(kernels), _read_vocab(draft_vocab, mtp=mtp), ranks_of(tensor_group)
    if ranks and adapter_path is not None:
        raise ValueError(f"adapter_path={adapter_path}: not on {ranks.size} ranks; fuse the adapters first")
    path = find_checkpoint(path_or_hf_repo, revision, code=trust_remote_code)
    with in_turn():
        config = read_config(path, model_config)
        drafting = Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model)
        model = _load(path, config, drafting, budget, ranks, lazy=lazy)
        if adapter_path is not None:
            model = _adapted(model, adapter_path)
        trusted = {"trust_remote_code": True} if trust_remote_code else {}
        tokenizer = load_tokenizer(path, trusted | (tokenizer_config or {}), config)
        unknown = sum(token >= model.vocab_size for token in tokenizer.get_vocab().values())
        if unknown > model.vocab_size // 100:  # a few more are usual
            warnings.warn(f"{path}: the model has no embedding for {unknown} tokens of the tokenizer", stacklevel=2)
        _finish(model, path, vocab, tokenizer, lane, budget, lazy=lazy)
        wire(nbytes(model.parameters()), wired_limit)
        model.report = replace(model.report, prefill_chunk=prefill_chunk(model, budget.layout, lazy=lazy))
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
    check_wired_limit(wired_limit)
    lane, vocab, ranks = requested(kernels), _read_vocab(draft_vocab, mtp=mtp), ranks_of(tensor_group)
    path = find_checkpoint(path)
    with in_turn():
        drafting = Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model)
        model = _load(path, read_config(path), drafting, budget, ranks, lazy=lazy)
        _finish(model, path, vocab, None, lane, budget, lazy=lazy)
        wire(nbytes(model.parameters()), wired_limit)
        model.report = replace(model.report, prefill_chunk=prefill_chunk(model, budget.layout, lazy=lazy))
    return model


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


def _load(path: Path, config: dict, drafting: Drafting, budget: Budget, ranks: Ranks | None, *, lazy: bool) -> Any:
    drafting.check()
    drafting = replace(drafting, mtp_path=find_heads(drafting.mtp_path, path))
    if program := config.get("model_file"):
        raise ValueError(f"{path}/config.json: model_file={program}: mlx_mtp runs no checkpoint's own model code")
    port = find_port(config)
    if port is None:
        if ranks:
            raise ValueError(f"ranks={ranks.size}: model_type {config['model_type']!r} has no port; allowed is 1")
        return load_plain(path, config, drafting, budget, lazy=lazy)
    if drafting.draft_model is not None and is_split(drafter := resolve(drafting.draft_model)):
        drafting = replace(drafting, draft_model=None, mtp_path=drafter)
    model = load_port(port, path, config, drafting, budget, ranks, lazy=lazy)
    if mx.default_device() == mx.cpu:
        share_angles(model)
    cut_experts(model)
    number_rows(model.modules())
    if drafting.heads and not model.mtp:
        warnings.warn(f"{path}: no MTP heads found ({model.report.source}); decoding plainly", stacklevel=4)
    return model


def _finish(
    model: Any, path: Path, vocab: DraftVocab | None, tokenizer: Any, lane: str | None, budget: Budget, *, lazy: bool
) -> None:
    """Test the first head, reduce the draft vocabulary, switch kernels on; the report notes what came of it."""
    if not lazy:
        texts = {"random tokens": random_tokens(model.vocab_size)}
        if tokenizer is not None:
            texts["words"] = tokenizer.encode(WORDS)
        if later := vocab is None and is_large(model):
            texts = {kind: tokens[:FEW_TOKENS] for kind, tokens in texts.items()}
        model.untested = partial(_test_heads, model, model.untested, path, texts)
        model.report = replace(model.report, untested=later and bool(model.mtp))
        if not later:
            test_heads(model)
            mx.eval(model.parameters())
    if vocab is not None:
        _reduce(model, vocab, tokenizer, lazy=lazy)
    bits = {bits for name in ("kv_bits", "mtp_kv_bits") if (bits := budget.layout.get(name))}
    kernels, not_exact = switch_on(model, lane, lazy=lazy, **({"kv_bits": bits} if bits else {}))
    model.report = replace(model.report, kernels=kernels, not_exact=not_exact)


def _test_heads(model: Any, read: Callable[[], None] | None, path: Path, texts: dict[str, list[int]]) -> None:
    if read is not None:
        read()
    self_test(model, path, texts)
    model.report = replace(model.report, untested=False)


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


class Plain:
    """Mixin in front of mlx-lm's Model: the part of a port's contract that needs no knowledge of the model."""

    mtp: tuple = ()
    untested: Any = None
    max_draft_tokens = 0
    NO_KV_BITS = "a family that has no port"
    vocab_size: int

    def windows(self) -> list[CacheKind]:
        return [MlxLmCaches]

    def head_windows(self) -> list[int | None]:
        return []

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.vocab_size))

    def hidden(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Compute logits [1, 1, V] of the last of tokens [1, L], which is all that plain decoding asks for."""
        return cache[0].read(self, tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden

    def choice(self, hidden: mx.array) -> None:
        """Return None: `hidden` is the logits."""


def load_plain(path: Path, config: dict, drafting: Drafting, budget: Budget, *, lazy: bool) -> Any:
    """Load mlx-lm's own model, make its report, and warn that nothing is drafted; ValueError if damaged."""
    name, known = config["model_type"], ", ".join(port_names())
    for option in ("draft_model", "mtp_path", "mtp_overrides"):
        if value := getattr(drafting, option):
            raise ValueError(f"{option}={value}: model_type {name!r} has no port that drafts; ports are {known}")
    ignored: list[str] = []
    with one_line(f"{path}: cannot be loaded", keep=True):
        model = _build(path, config, known, ignored)
        if not lazy:
            budget.check(model, path)
            check_numbers(named(model), lambda name: (path, name))
    source = f"model_type {name!r} has no MTP port"
    model.report = make_report(model, config, source=source, norms="mlx-lm's", ignored=tuple(ignored))
    if drafting.mtp:
        warnings.warn(f"{path}: {source}; decoding plainly, with mlx-lm's own model", stacklevel=4)
    return model


def _build(path: Path, config: dict, ports: str, ignored: list[str]) -> Any:
    """Build mlx-lm's model, its weights not read; tensors that it does not know are appended to `ignored`."""
    name = config["model_type"]
    try:
        family = importlib.import_module(f"mlx_lm.models.{mlx_lm_utils.MODEL_REMAPPING.get(name, name)}")
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}/config.json: model_type {name!r} is unknown; known are {ports} and mlx-lm's"
        ) from None
    stored = read_stored(path)

    def build(args: Any) -> Any:
        kind: Any = type("Model", (Plain, family.Model), {})
        model = kind(args)
        apply_rope(model, config)
        model.sanitize = partial(_sanitize, model, stored)
        model.load_weights = partial(_load_weights, model, stored, ignored)
        return model

    normal = normalize(config)
    normal.check(path / "config.json")
    normal.warn(path / "config.json", stacklevel=5)
    args = SimpleNamespace(from_dict=lambda merged: family.ModelArgs.from_dict(config))
    classes: Any = (build, args)
    options: Any = {"model_config": config, "get_model_classes": lambda config: classes}
    try:
        with weights_apart(path) as apart:
            model, _ = mlx_lm_utils.load_model(apart, lazy=True, strict=False, **options)
    except (ValueError, KeyError) as e:
        reason = packed_by(path, config, stored.trunk) or (isinstance(e, KeyError) and stored.lacking())
        if reason:
            raise ValueError(reason) from e
        raise
    del model.sanitize, model.load_weights  # what loads later, as adapters, is not a checkpoint
    model.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]  # its shape only: nothing is computed
    return model


def _sanitize(model: Any, stored: Stored, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Do what mlx-lm asks for with what it found by name, which is nothing, with the trunk's tensors."""
    weights = read_tensors(stored.trunk)
    return type(model).sanitize(model, weights) if hasattr(type(model), "sanitize") else weights


def _load_weights(
    model: Any, stored: Stored, ignored: list[str], weights: list[tuple[str, mx.array]], **_: Any
) -> None:
    """Do as `nn.Module.load_weights`, but name what is missing and skip what the model has no place for."""
    expected, found = named(model), dict(weights)
    if missing := sorted(expected.keys() - found.keys()):
        unnamed = f"{stored.path}: tensor {missing[0]} is missing; config.json expects it"
        raise ValueError(stored.lacking(missing) or unnamed)
    stored.warn(stacklevel=7)
    ignored += sorted(found.keys() - expected.keys())
    nn.Module.load_weights(model, [(n, w) for n, w in weights if n in expected], strict=True)
