"""Directory or hub name -> config.json -> port -> checked weights -> (model, tokenizer).

mlx-lm's `load_model` does the trunk and all quantization formats; here: finding the heads by their tensors,
and errors that name what is wrong.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.memory_needs import Budget
from ..machine.errors import first_line
from ..models import find_port, port_names
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .draft_vocab import DraftVocab, reduce_heads
from .draft_vocab import read as read_vocab
from .external_drafter import attach_drafter
from .files import check_numbers, dequantized, read_config, read_header, read_tensors, resolve
from .head_self_test import LEAST, WORDS, agreement, random_tokens
from .mlx_lm_model import load_plain
from .norm_conventions import conventions, warn_of_unusual
from .report import after_reducing, make_report
from .sort_tensors import Contents, Drafting, sort_tensors
from .tensor_names import expected, origin

EXPERT = re.compile(r"\.experts\.\d+\.")  # of which one is like the others
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
    lane = requested(kernels)
    vocab = _read_vocab(draft_vocab, mtp=mtp)
    path = resolve(path_or_hf_repo, revision)
    model = _load(path, Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model), budget, lazy=lazy)
    if adapter_path is not None:
        if not (Path(adapter_path) / "adapter_config.json").is_file():
            raise ValueError(f"adapter_path={adapter_path}: no adapter_config.json in it")
        try:
            read_header([Path(adapter_path) / "adapters.safetensors"])
            model = mlx_lm_utils.load_adapters(model, adapter_path)
        except Exception as e:
            raise ValueError(f"{adapter_path}: no usable adapters ({first_line(e)})") from e
        model.eval()
    tokenizer = load_tokenizer(path, tokenizer_config)
    _check_tokens(tokenizer, model.vocab_size, path)
    if not lazy:
        _test_heads(model, path, {"words": tokenizer.encode(WORDS)})
    _reduce(model, vocab, tokenizer, lazy=lazy)
    _switch_on(model, lane, lazy=lazy)
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
    """`load` for the model alone, from a local directory; whose tokenizer a draft vocabulary is of is not checked."""
    lane = requested(kernels)
    vocab = _read_vocab(draft_vocab, mtp=mtp)
    model = _load(resolve(path), Drafting(mtp, mtp_path, mtp_overrides or {}, draft_model), budget, lazy=lazy)
    if not lazy:
        _test_heads(model, Path(path), {})
    _reduce(model, vocab, None, lazy=lazy)
    _switch_on(model, lane, lazy=lazy)
    return model


def load_tokenizer(path: Path, tokenizer_config: dict[str, Any] | None = None) -> TokenizerWrapper:
    """The tokenizer of a checkpoint's directory, with config.json's stop tokens."""
    try:
        eos = read_config(path).get("eos_token_id")
        tokenizer = mlx_lm_utils.load_tokenizer(path, tokenizer_config, eos_token_ids=eos)
        tokens = tokenizer.get_vocab()
    except Exception as e:
        raise ValueError(f"{path}: no usable tokenizer ({first_line(e)})") from e
    if not tokens:  # what transformers makes of a file that it does not find
        raise ValueError(f"{path}: no usable tokenizer (it has no tokens)")
    return tokenizer


def _check_tokens(tokenizer: TokenizerWrapper, vocab_size: Any, path: Path) -> None:
    """Warn of a tokenizer made for more tokens than the model has; a few more are usual."""
    unknown = sum(token >= vocab_size for token in tokenizer.get_vocab().values())
    if unknown > vocab_size // 100:
        warnings.warn(f"{path}: the model has no embedding for {unknown} tokens of the tokenizer", stacklevel=3)


def _load(path: Path, drafting: Drafting, budget: Budget, *, lazy: bool) -> Any:
    config = read_config(path)
    drafting.check()
    port = find_port(config)
    if port is None:
        return _load_plain(path, config, drafting, budget, lazy=lazy)
    model = _load_port(port, path, config, drafting, budget, lazy=lazy)
    if drafting.heads and not model.mtp:
        warnings.warn(f"{path}: no MTP heads found ({model.report.source}); decoding plainly", stacklevel=4)
    return model


def _load_plain(path: Path, config: dict, drafting: Drafting, budget: Budget, *, lazy: bool) -> Any:
    """A family without a port: mlx-lm's own model, and a warning that nothing is drafted."""
    name, known = config["model_type"], ", ".join(port_names())
    for option in ("draft_model", "mtp_path", "mtp_overrides"):
        if value := getattr(drafting, option):
            raise ValueError(f"{option}={value}: model_type {name!r} has no port that drafts; ports are {known}")
    try:
        model, ignored = load_plain(path, config, ports=known)
        if not lazy:
            budget.check(model, path)
            mx.eval(model.parameters())
            check_numbers(_arrays(model.parameters()), lambda name: (path, name))
    except Exception as e:
        if isinstance(e, ValueError) and "\n" not in str(e):
            raise
        raise ValueError(f"{path}: cannot be loaded ({first_line(e)})") from e
    source = f"model_type {name!r} has no MTP port"
    model.report = make_report(model, config, source=source, norms="mlx-lm's", ignored=ignored)
    if drafting.mtp:
        warnings.warn(f"{path}: {source}; decoding plainly, with mlx-lm's own model", stacklevel=4)
    return model


def read_port(
    port: ModuleType, path: Path, config: dict, drafting: Drafting
) -> tuple[Any, Contents, tuple[bool, bool]]:
    """(the model with parameters that are read and computed when they are used, what the checkpoint holds, whether
    the trunk's norms and the heads' were stored zero-centred). Raises ValueError.
    """
    args = read_args(port, path, config)
    contents = sort_tensors(port, path, args.num_hidden_layers, drafting)
    spec = contents.spec
    raw, raw_heads = conventions(port.Model.ZERO_CENTRED, contents.trunk, contents.heads, alone=contents.alone)

    def build(args: Any) -> nn.Module:
        try:
            model = port.Model(args, contents.depths, spec)
        except (TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, ValueError) as e:
            raise ValueError(f"{path}/config.json: the model cannot be built from it ({first_line(e)})") from e
        _check_names(model, contents)
        shift = {"shift_trunk": raw, "shift_heads": raw_heads}
        model.sanitize = partial(_sanitize, model, contents, path, shift)
        model.load_weights = partial(_load_checked, model, contents, path)
        return model

    classes: Any = (build, port.ModelArgs)
    overrides = contents.overrides(config)
    try:
        model, _ = mlx_lm_utils.load_model(
            path, lazy=True, strict=False, model_config=overrides, get_model_classes=lambda config: classes
        )
    except Exception as e:
        if isinstance(e, ValueError) and "\n" not in str(e):
            raise
        raise ValueError(f"{path}: cannot be loaded ({first_line(e)})") from e
    del model.sanitize, model.load_weights  # what loads later, as adapters, is not a checkpoint
    return model, contents, (raw, raw_heads)


def _load_port(port: ModuleType, path: Path, config: dict, drafting: Drafting, budget: Budget, *, lazy: bool) -> Any:
    model, contents, raw = read_port(port, path, config, drafting)
    expanded = _expand_experts(model)
    if not lazy:
        with _as_its_config_says(path):
            budget.check(model, path)
        mx.eval(model.parameters())
        check_weights(model, contents)
        _tie(model)
    check_norms(model, contents, raw)
    source, ignored = contents.source, contents.ignored
    if drafting.draft_model is not None:
        source, unused = attach_drafter(model, drafting.draft_model, drafting.mtp_overrides)
        _tie(model)
        ignored += unused
    shifted = raw[bool(contents.depths)]
    norms = "shifted by +1 while loading (stored zero-centred)" if shifted else "as stored (already shifted)"
    model.report = make_report(model, config, source=source, norms=norms, ignored=ignored, expanded=expanded)
    if 0 < contents.depths < (model.report.declared or 0) and not drafting.mtp_overrides:
        found = f"tensors of {contents.depths} MTP heads found, config.json declares {model.report.declared}"
        warnings.warn(f"{path}: {found}", stacklevel=4)
    return model


def check_norms(model: Any, contents: Contents, raw: tuple[bool, bool]) -> None:
    """Warn of norms that look unshifted, shifted twice, or of two conventions."""
    checked: Any = model
    if contents.alone:
        checked = nn.Module()
        checked.mtp = model.mtp
    if model.ZERO_CENTRED is not None:
        warn_of_unusual(checked, *raw, partial(origin, model, contents))


@contextlib.contextmanager
def _as_its_config_says(path: Path) -> Iterator[None]:
    """The first passes of a model: what cannot be computed is due to an entry of another type than is expected."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as e:
        raise ValueError(f"{path}/config.json: the model that it describes cannot run ({first_line(e)})") from e


def _switch_on(model: Any, lane: str | None, *, lazy: bool) -> None:
    """Switch on the model's kernels, and note in the report which."""
    kernels, not_exact = switch_on(model, lane, lazy=lazy)
    model.report = replace(model.report, kernels=kernels, not_exact=not_exact)


def _read_vocab(draft_vocab: Any, *, mtp: bool) -> DraftVocab | None:
    if draft_vocab is not None and not mtp:
        raise ValueError(f"draft_vocab={draft_vocab}: not together with mtp=False")
    return None if draft_vocab is None else read_vocab(draft_vocab)


def _reduce(model: Any, vocab: DraftVocab | None, tokenizer: Any, *, lazy: bool) -> None:
    """Let the heads draft from the listed tokens alone, and note in the report what that saves."""
    if vocab is None:
        return
    if not model.mtp:
        raise ValueError(f"draft_vocab={vocab.source}: the model has no heads that draft; allowed is None")
    vocab.check(model.vocab_size, tokenizer)
    model.report = after_reducing(model.report, model, reduce_heads(model, vocab.tokens))
    if not lazy:
        mx.eval([head.parameters() for head in model.mtp])  # lets go of the rows that are not listed


def _test_heads(model: Any, path: Path, texts: dict[str, list[int]]) -> None:
    """Note in the report how often the first head is right, and warn where it never is."""
    if not model.mtp:
        return
    texts = {"random tokens": random_tokens(model.vocab_size), **texts}
    with _as_its_config_says(path):
        shares = {kind: agreement(model, tokens) for kind, tokens in texts.items() if len(tokens) > 2}
    model.report = replace(model.report, agreement=tuple(shares.items()))
    if max(shares.values()) < LEAST:
        kinds = ", ".join(f"{share:.1%} of {kind}" for kind, share in shares.items())
        warnings.warn(f"{path}: the first head agrees with the target on {kinds}; expect no speed-up", stacklevel=3)


def read_args(port: ModuleType, path: Path, config: dict) -> Any:
    """The port's ModelArgs of a config.json; ValueError names what is wrong with it."""
    try:
        args = port.ModelArgs.from_dict(config)
        if not isinstance(args.num_hidden_layers, int):
            raise TypeError(f"num_hidden_layers is {args.num_hidden_layers!r}, expected an integer")
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        raise ValueError(f"{path}/config.json: {first_line(e)}") from e
    return args


def _check_names(model: Any, contents: Contents) -> None:
    """Raise for a trunk tensor that mlx-lm would drop in silence, such as a layer that config.json denies."""
    modules = {path.rpartition(".")[0] for path in _arrays(model.parameters())}
    known: set[str] = set()
    for name, tensor in contents.trunk.items():
        if (alike := EXPERT.sub(".experts.0.", name)) in known:
            continue
        known.add(alike)
        if not any(path.rpartition(".")[0] in modules for path in model.renamed(name)):
            layers = model.args.num_hidden_layers
            raise ValueError(
                f"{tensor.file}: tensor {name} is not part of the model; "
                f"config.json expects {layers} layers, and MTP heads {model.spec.place(layers)}"
            )


def _sanitize(model: Any, contents: Contents, path: Path, shift: dict, weights: dict) -> dict:
    """What mlx-lm calls with all that it found by name: hand the port the trunk's and the heads' tensors."""
    weights.clear()  # else every file is open twice, and a process may open but so many
    wanted = {} if contents.alone else contents.trunk
    stored = read_tensors(wanted | contents.heads)  # no name is in both
    trunk = dequantized({name: stored[name] for name in wanted}, wanted)
    heads = dequantized({name: stored[name] for name in contents.heads}, contents.heads)
    try:
        return model.sanitized(trunk, heads, **shift)
    except KeyError as e:  # mlx-lm takes for granted what it stacks or splits
        ((file, raw),) = expected(model, contents, path, [str(e.args[0])])
        raise ValueError(f"{file}: tensor {raw} is missing; the rest of its layer needs it") from None


def _load_checked(
    model: nn.Module, contents: Contents, path: Path, weights: list[tuple[str, mx.array]], strict: bool
) -> None:
    """`nn.Module.load_weights` with errors that name file, tensor, expected and found."""
    parameters = _arrays(model.parameters())
    if contents.alone:
        parameters = {name: array for name, array in parameters.items() if name.startswith("mtp.")}
    found = dict(weights)
    for name, array in parameters.items():
        if name not in found:
            ((file, raw),) = expected(model, contents, path, [name])
            raise ValueError(f"{file}: tensor {raw} is missing; config.json expects it with shape {array.shape}")
        if found[name].shape != array.shape:
            file, raw = origin(model, contents, name)
            raise ValueError(f"{file}: tensor {raw} has shape {found[name].shape}; config.json expects {array.shape}")
    for name in found:
        if name not in parameters:
            file, raw = origin(model, contents, name)
            raise ValueError(f"{file}: tensor {raw} is not part of the model that config.json describes")
    nn.Module.load_weights(model, weights, strict=False)


def _expand_experts(model: nn.Module) -> bool:
    """Make a half-precision model with unquantized experts float32 on a CPU, where MLX multiplies no others."""
    experts = [m for m in model.modules() if type(m) is SwitchLinear and m.weight.dtype != mx.float32]
    if not experts or mx.default_device() != mx.Device(mx.cpu):
        return False
    model.set_dtype(mx.float32)
    return True


def check_weights(model: Any, contents: Contents, *, vectors: bool = False) -> None:
    """Raise for NaN, and where a head's tensor is nothing but zeros: it would draft, and never be right.

    vectors: look at these alone, which are small.
    """
    found = _arrays(model.parameters())
    if contents.alone:
        found = {name: array for name, array in found.items() if name.startswith("mtp.")}
    if vectors:
        found = {name: array for name, array in found.items() if array.ndim < 2}
    check_numbers(found, partial(origin, model, contents))


def _tie(model: Any) -> None:
    """Drop a head's own embedding or LM head where it only repeats the target's."""
    for head in model.mtp:
        for name, shared in (("head", model.language.get("lm_head")), ("embed_tokens", model.model.embed_tokens)):
            if name in head and shared is not None and _equal(_arrays(head[name]), _arrays(shared)):
                head.pop(name)


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and mx.array_equal(a[n], b[n]) for n in a)


def _arrays(tree: Any) -> dict[str, Any]:
    return dict(tree_flatten(tree))  # type: ignore[arg-type]
