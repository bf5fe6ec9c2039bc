"""Load a model with its MTP heads, and its tokenizer, from a directory, a GGUF file or the hub.

mlx-lm's `load_model` builds the target and reads every quantization format; this room finds the heads by their
tensors, checks the files, and tests the loaded heads. A family without a port gets one made of mlx-lm's own model.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer

from ..decoding.graph_memory import nbytes
from ..decoding.memory_needs import Budget
from ..decoding.prefill import test_heads
from ..decoding.prefill_chunk import prefill_chunk
from ..decoding.row_check import prepare_rows
from ..machine.errors import one_line
from ..machine.ranges import FLAG, Allowed, InstanceOf, check_options
from ..machine.stream import in_turn
from ..machine.wired import AUTO, WiredLimit, check_wired_limit, wire
from ..models import find_port
from ..ranks.group import Ranks, ranks_of
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .adapters import AdapterPath
from .adapters import load_adapters as _adapted
from .build import load_port
from .cure import NeverDrafts, adding_heads
from .draft_vocab import DraftVocab, reduce_heads
from .draft_vocab import read as read_vocab
from .end_of_turn import add_end_of_turn
from .expand_heads import expand_heads
from .files import read_config
from .find_drafter import joins_heads
from .gguf.cached import find_checkpoint, find_heads
from .head_self_test import FEW_TOKENS, WORDS, is_large, random_tokens, self_test
from .load_made import load_made
from .report import drafting_bytes
from .separate_heads import is_split
from .small_model import attach_small_model, check_tokens, instead_of_heads, is_small_model
from .sort_tensors import Drafting
from .tokenizer_settings import checked_settings
from .tuned import attach_tuned, fits, shipped_heads
from .vision import Sight, open_vision

WEIGHTS_ALONE = Budget()
TOKENIZER = "tokenizer.json"
UNTRUSTED = "it is code of the checkpoint, which runs only with --trust-remote-code, in Python trust_remote_code=True"
PATH = InstanceOf("a path, or None", (str, PathLike), optional=True)
LOADING: dict[str, Allowed] = {
    **dict.fromkeys(("path_or_hf_repo", "path"), InstanceOf("a path or the name of a repository", (str, PathLike))),
    **dict.fromkeys(("lazy", "return_config", "trust_remote_code", "mtp", "vision"), FLAG),
    **dict.fromkeys(("mtp_path", "draft_model", "vision_path"), PATH),
    **dict.fromkeys(
        ("tokenizer_config", "model_config", "mtp_overrides"), InstanceOf("a dict, or None", (dict,), True)
    ),
    "revision": InstanceOf("a text, or None", (str,), optional=True),
    "budget": InstanceOf("a Budget", (Budget,)),
}


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: AdapterPath | None = None,
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
    vision: bool = True,
    vision_path: str | Path | None = None,
) -> Any:
    """Load a checkpoint with its MTP heads, as `mlx_lm.load`; return (model, tokenizer[, config]).

    On a CPU the heads of a large model are read, checked and tested before the first draft. SmolLM2-135M-Instruct
    gets the heads in this package. Loads from several threads run one after the other, and every thread can use the
    result. A GGUF file, also as `mtp_path`, is transcoded once into the user's cache folder.

    tokenizer_config: as in mlx-lm. model_config: values that replace config.json's. return_config: also return the
        resulting config. revision: branch, tag or commit on the hub. trust_remote_code: run the tokenizer's code.
    adapter_path: directory of LoRA adapters of mlx-lm or PEFT, which change the target and not its heads. Of several
        the changes are added up. A dict of directories by name selects none: `model.runtime.adapters.select(name)`
        does, for later generations (None: the model alone). A prompt cache can only be continued with its adapter.
    lazy: leave weights on disk until they are used; memory, NaN and zeros are then not checked, and kernels are not
        tried. An external drafter that is no small model is read and checked nevertheless.
    mtp: False neither loads nor allocates the heads; a block drafter as `draft_model` then drafts alone.
    mtp_path, vision_path: file or directory of the heads, or of the vision tower, for example the released
        checkpoint, instead of the checkpoint's own. vision: False refuses pictures. A tower is read at the first.
    mtp_overrides: values that replace some of the family's MTPSpec, for tests; with `draft_model` the drafter's.
    draft_model: directory or hub name. A block drafter (DFlash, DFlash2, DSpark, or "demo-block") joins the heads;
        EAGLE-3, MTP heads that mlx-vlm split off, and a small model with the target's tokens replace them.
    draft_vocab: file of `mlx-mtp draft-vocab`, or token ids, to which the heads' drafts are restricted.
    kernels: "off", "exact" (products with the bits of MLX's one-row kernels) or "matrix" (products by simdgroup
        matrices, whose bits differ). None is MLX_MTP_KERNELS, else the lane and the kernels that are faster here.
    budget: memory to check for before weights are read. wired_limit: bytes that the process keeps resident on the
        GPU, never lowered by a later load; "auto" only for a model that needs most of the working set, "off" never.
    tensor_group: from `mx.distributed.init()`: split the target over its ranks, which all have to load it and to make
        the same calls; each has whole heads. Not with adapters.
    Raises a one-line ValueError for a wrong option, and a checkpoint that is damaged, unsupported or too large.
    """
    options = _checked(locals())
    path = find_checkpoint(path_or_hf_repo, revision, code=trust_remote_code)
    with in_turn():
        config = read_config(path, model_config)
        model = _load(path, config, options)
        _finish(model, path, tokenizer := _tokenizer_for(model, path, options.tokenizer_config, config), options)
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
    vision: bool = True,
    vision_path: str | Path | None = None,
) -> Any:
    """Load only the model, as `load` does, and return it; a draft vocabulary's tokenizer is not checked."""
    options = _checked({**locals(), "adapter_path": None, "tokenizer_config": None, "trust_remote_code": False})
    path = find_checkpoint(path)
    with in_turn():
        model = _load(path, read_config(path), options)
        _finish(model, path, None, options)
    return model


class LoadOptions(NamedTuple):
    """The options of a load, checked before the checkpoint is read.

    lane: kernels to enable, as in `switch_on`. tokenizer_config: as in `load_tokenizer`.
    """

    drafting: Drafting
    vocab: DraftVocab | None
    lane: str | None
    budget: Budget
    wired: WiredLimit
    ranks: Ranks | None
    lazy: bool
    adapter_path: AdapterPath | None
    sight: Sight
    tokenizer_config: dict[str, Any]


def _checked(given: dict[str, Any]) -> LoadOptions:
    """Return the options of a load, checked without the checkpoint; a file with a draft vocabulary is read.

    given: the arguments of `load` or `load_model`, by name. ValueError for an option that is not allowed.
    """
    check_options(given, LOADING)
    check_wired_limit(given["wired_limit"])
    drafting = Drafting(given["mtp"], given["mtp_path"], given["mtp_overrides"] or {}, given["draft_model"])
    sight, lane = Sight(given["vision"], given["vision_path"]), requested(given["kernels"])
    sight.check()
    draft_vocab = given["draft_vocab"]
    if draft_vocab is not None and not drafting.mtp:
        raise ValueError(f"draft_vocab={draft_vocab}: not together with mtp=False")
    vocab, ranks = None if draft_vocab is None else read_vocab(draft_vocab), ranks_of(given["tensor_group"])
    adapters, budget, wired = given["adapter_path"], given["budget"], given["wired_limit"]
    if ranks and adapters:
        names = adapters if isinstance(adapters, (str, Path)) else ", ".join(map(str, adapters))
        raise ValueError(f"adapter_path={names}: not on {ranks.size} ranks; fuse the adapters first")
    code = {"trust_remote_code": given["trust_remote_code"], **(given["tokenizer_config"] or {})}
    return LoadOptions(drafting, vocab, lane, budget, wired, ranks, given["lazy"], adapters, sight, code)


def load_tokenizer(
    path: Path, tokenizer_config: dict[str, Any] | None = None, config: dict | None = None
) -> TokenizerWrapper:
    """Return the tokenizer in a checkpoint's directory; ValueError if it cannot be loaded or has no tokens.

    tokenizer_config: as in mlx-lm; code of the checkpoint is run only if its `trust_remote_code` is true.
    config: the config.json whose stop tokens are used; None reads it from the directory.
    """
    given = dict(tokenizer_config or {})
    # Without False transformers asks on standard input whether to run the checkpoint's code.
    given["trust_remote_code"] = bool(given.get("trust_remote_code"))
    missing = "" if (path / TOKENIZER).is_file() else f"; {TOKENIZER} is missing"
    with one_line(f"{path}: no usable tokenizer{missing}"):
        checked_settings(path)
        eos = (read_config(path) if config is None else config).get("eos_token_id")
        try:
            tokenizer = mlx_lm_utils.load_tokenizer(path, given, eos_token_ids=eos)
        except ValueError as e:
            if given["trust_remote_code"] or "trust_remote_code=True" not in str(e):
                raise
            raise ValueError(UNTRUSTED) from e
        if not tokenizer.get_vocab():  # transformers ignores a missing file
            raise ValueError("it has no tokens")
    add_end_of_turn(tokenizer)
    return tokenizer


def check_tokenizer(path: Path, *, code: bool = False) -> None:
    """Raise ValueError if a checkpoint's tokenizer cannot be loaded; a tokenizer.json is only parsed.

    code: whether code of the checkpoint may be run.
    """
    file = path / TOKENIZER
    with one_line(f"{path}: no usable tokenizer"):
        settings = checked_settings(path)
    if not file.is_file() or "auto_map" in settings:
        load_tokenizer(path, {"trust_remote_code": code})
        return
    with one_line(f"{file}: damaged"):  # the parser raises errors of type Exception
        Tokenizer.from_file(str(file))


def _tokenizer_for(model: Any, path: Path, tokenizer_config: dict[str, Any], config: dict) -> TokenizerWrapper:
    """Return a model's tokenizer; warn if tokens without an embedding are more than 1% of the model's vocabulary.

    ValueError as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(path, tokenizer_config, config)
    unknown = sum(token >= model.vocab_size for token in tokenizer.get_vocab().values())
    if unknown > model.vocab_size // 100:  # a few are normal
        warnings.warn(f"{path}: the model has no embedding for {unknown} tokens of the tokenizer", stacklevel=3)
    return tokenizer


def _load(path: Path, config: dict, options: LoadOptions) -> Any:
    """Return the model with its heads and adapters, before tests, kernels and a draft vocabulary."""
    drafting, budget, ranks, lazy = options.drafting, options.budget, options.ranks, options.lazy
    port, small, drafter = find_port(config), None, None
    if drafting.draft_model is not None:
        drafter = find_checkpoint(drafting.draft_model)
    drafting = replace(drafting, joins=drafter is not None and joins_heads(drafter))
    drafting.check()
    drafting = replace(drafting, mtp_path=find_heads(drafting.mtp_path, path))
    if program := config.get("model_file"):
        raise ValueError(f"{path}/config.json: model_file={program}: code of a checkpoint's own model is not run")
    if port is None:
        small = drafter if drafter and is_small_model(drafter) else None
        model = load_made(path, config, drafting, budget, ranks, lazy=lazy, drafter=None if small else drafter)
        model.runtime.blind = open_vision(path, config, None, options.sight, 0)[1]
        if model.mtp:
            attach_tuned(model, drafting.mtp_path)
        if small:
            attach_small_model(model, small, budget, lazy=lazy)
    else:
        if drafter and is_split(drafter):
            drafting = replace(drafting, draft_model=None, mtp_path=drafter)
        elif drafter and is_small_model(drafter):
            small, drafting = drafter, instead_of_heads(drafting)
        if drafting.heads and drafting.mtp_path is None and (shipped := shipped_heads(config)):
            bare = load_port(port, path, config, Drafting(True, None, {}, None), budget, lazy=True)  # reads norms
            if not bare.mtp and fits(bare, shipped):
                drafting = replace(drafting, mtp_path=shipped)
        given = {"ranks": ranks, "lazy": lazy, "sight": options.sight}
        model = load_port(port, path, config, drafting, budget, **given)
        if model.mtp:
            attach_tuned(model, drafting.mtp_path)
        if small:
            attach_small_model(model, small, budget, lazy=lazy)
        if drafting.heads and not model.mtp and not model.drafter:
            found = f"{path}: no MTP heads found ({model.report.source}); decoding plainly"
            cure = f"; to add them: {adding_heads(path)}" if model.SPEC.tensors else ""
            warnings.warn(found + cure, UserWarning if cure else NeverDrafts, stacklevel=4)
    return model if options.adapter_path is None else _adapted(model, options.adapter_path)


def _finish(model: Any, path: Path, tokenizer: Any, options: LoadOptions) -> None:
    """Test the heads (now or later, not if lazy), reduce their vocabulary, enable kernels, and wire memory.

    The kernels and the prefill chunk are added to the report. ValueError if a small model that drafts has other
    tokens than the target.
    """
    vocab, layout, lazy = options.vocab, options.budget.layout, options.lazy
    trusted = {"trust_remote_code": options.tokenizer_config.get("trust_remote_code", False)}
    check_tokens(model, path, tokenizer, partial(load_tokenizer, tokenizer_config=trusted))
    if not lazy:
        defer = vocab is None and is_large(model)
        _test_or_defer(model, path, tokenizer, defer=defer, expand=options.lane != "off")
    if vocab is not None:
        _reduce(model, vocab, tokenizer, lazy=lazy)
    bits = {bits for name in ("kv_bits", "mtp_kv_bits") if (bits := layout.get(name))}
    kernels, not_exact = switch_on(model, options.lane, lazy=lazy, **({"kv_bits": bits} if bits else {}))
    model.runtime.choosing = options.lane != "off"
    model.runtime.note(kernels=kernels, not_exact=not_exact)
    wire(nbytes(model.parameters()), options.wired)
    model.runtime.note(prefill_chunk=prefill_chunk(model, layout, lazy=lazy))
    if not lazy:
        prepare_rows(model, layout)


def _test_or_defer(model: Any, path: Path, tokenizer: Any, *, defer: bool, expand: bool) -> None:
    """Read and test the heads, and read all other weights, now.

    `defer` reads nothing: the heads are read before the first draft, and tested with the first tokens of one text,
    the words if they are more than two tokens. expand: call `expand_heads` after they are read.
    """
    texts = {"random tokens": random_tokens(model.vocab_size)}
    if tokenizer is not None:
        texts["words"] = tokenizer.encode(WORDS)
    if defer:
        kind = "words" if len(texts.get("words", ())) > 2 else "random tokens"
        texts = {kind: texts[kind][:FEW_TOKENS]}
    model.runtime.untested = partial(_test_heads, model, model.runtime.untested, path, texts, expand=expand)
    model.runtime.note(untested=defer and bool(model.mtp))
    if not defer:
        test_heads(model)
        mx.eval(model.parameters())


def _test_heads(
    model: Any, read: Callable[[], None] | None, path: Path, texts: dict[str, list[int]], *, expand: bool
) -> None:
    """Read the heads, and test them with the target as it was loaded and with each adapter that can be selected.

    expand: call `expand_heads` in between.
    """
    if read is not None:
        read()
    if expand:
        expand_heads(model)
    adapters, report = model.runtime.adapters, model.report
    with adapters.using(report.adapter or None):
        self_test(model, path, texts)
    alone, found = model.report.agreement, []
    for name, _ in report.adapters if model.mtp else ():
        with adapters.using(name):
            self_test(model, path, texts)
        found.append((name, model.report.agreement))
    model.runtime.note(untested=False, agreement=alone, adapters=tuple(found) or report.adapters)


def _reduce(model: Any, vocab: DraftVocab, tokenizer: Any, *, lazy: bool) -> None:
    """Restrict the heads to drafting the listed tokens, and add the saved bytes to the report.

    lazy: the reduced heads are not evaluated. ValueError without heads, or if a token does not fit the model or
    tokenizer.
    """
    if not model.mtp:
        raise ValueError(f"draft_vocab={vocab.source}: the model has no heads that draft; allowed is None")
    vocab.check(model.vocab_size, tokenizer)
    rows, before = reduce_heads(model, vocab.tokens), model.report.head_bytes
    after = drafting_bytes(model)
    model.runtime.note(head_bytes=after, drafted_from=rows, saved_bytes=before - after)
    if not lazy:
        mx.eval([head.parameters() for head in model.mtp])  # frees the other rows
