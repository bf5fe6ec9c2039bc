"""Compare and check a model's parameters, and find the checkpoint tensor that each comes from."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..kernels import block_scales
from ..layers.blocks import Blocks
from ..machine.progress import report_progress
from ..machine.stream import pass_turn
from .sort_tensors import NUMBER, Contents, layerless, only

OF_HEAD = re.compile(r"mtp\.\d+\.(?!.*\.biases$)")  # biases of quantized matrices may be zeros
ROWS = 4096  # compared at a time
PIECE = 1 << 29  # bytes of parameters that are evaluated together
POWER_NAN, FLOAT_NAN = 255, 127  # in 8 bits: of e8m0, and of e4m3, which has the other, too
BITS = {  # integer types of the same size, and the bits of infinity
    mx.float32: (mx.int32, mx.uint32, 0x7F800000),
    mx.bfloat16: (mx.int16, mx.uint16, 0x7F80),
    mx.float16: (mx.int16, mx.uint16, 0x7C00),
}


def named(module: nn.Module) -> dict[str, Any]:
    """Return a module's arrays by their paths, such as "mtp.0.norm.weight"."""
    return dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]


def stored_name(model: Any, path: str) -> str:
    """Return the name under which a conversion stores a parameter, or a module: in a head the hub's name."""
    if not path.startswith("mtp."):
        return model.PREFIX + path
    _, depth, inside = path.split(".", 2)
    layers = getattr(model.args, "num_hidden_layers", 0)  # a made port's heads have names without it
    return model.spec.name(int(depth), inside, layers)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two modules have the same paths (of `named`) and equal values at them; types may differ."""
    return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)


def is_targets(model: Any, name: str, module: nn.Module) -> bool:
    """Return whether a drafter's module equals the target's LM head (name "head") or embedding ("embed_tokens")."""
    theirs = model.unembedding() if name == "head" else model.embedding
    return isinstance(theirs, nn.Module) and same(named(module), named(theirs))


def _equal(a: mx.array, b: mx.array) -> bool:
    """Return whether two arrays have equal shapes and values; ROWS rows are read at a time, up to a difference."""
    if a.shape != b.shape or a.ndim < 2:
        return bool(mx.array_equal(a, b))
    return all(mx.array_equal(a[i : i + ROWS], b[i : i + ROWS]) for i in range(0, len(a), ROWS))


def trained(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """Return two lazy bool arrays [n] for n arrays of one type: which contain NaN, and which any other than zero.

    The maxima of the bits, as integers, of positive and negative numbers suffice, so that no mask is allocated.
    """
    dtype = arrays[0].dtype
    if dtype not in BITS or not all(array.size for array in arrays):
        return mx.stack([mx.isnan(array).any() for array in arrays]), mx.stack([array.any() for array in arrays])
    signed, unsigned, infinity = BITS[dtype]
    sign = 1 << (8 * dtype.size - 1)
    positive, negative = (mx.stack([array.view(bits).max() for array in arrays]) for bits in (signed, unsigned))
    nan = (positive > infinity) | (negative > mx.array(sign + infinity, unsigned))
    return nan, (positive > 0) | (negative > mx.array(sign, unsigned))


def check_numbers(parameters: dict[str, Any], place: Callable[[str], tuple[Any, str]]) -> None:
    """Evaluate all parameters; ValueError for one with NaN, or a head's parameter of zeros only.

    Only floating-point parameters are checked, and quantized matrices' biases may be zero. A head of which all
    matrices are zero is a warning instead. place: returns the file of a parameter (by its path) and its name in it.
    """
    found = _states(parameters)
    zeros = {name for name, (_, value) in found.items() if OF_HEAD.match(name) and not value}
    matrices = {name for name in found if parameters[name].ndim > 1 and OF_HEAD.match(name)}
    used = {_depth(name) for name in matrices - zeros}
    zero_heads = {depth: name for name in matrices if (depth := _depth(name)) not in used}
    for depth, name in sorted(zero_heads.items()):
        text = f"{place(name)[0]}: MTP depth {depth} holds only zeros, expected trained weights"
        warnings.warn(text, stacklevel=5)
    for name, (nan, _) in found.items():
        if nan or (name in zeros and _depth(name) not in zero_heads):
            state = "NaN" if nan else "only zeros"
            file, raw = place(name)
            raise ValueError(f"{file}: tensor {raw} holds {state}, expected trained weights")


def _states(parameters: dict[str, mx.array]) -> dict[str, tuple[bool, bool]]:
    """Evaluate all parameters, in pieces; return, of floating-point ones, by name, two bools.

    They are whether the parameter contains NaN, and whether it contains a number other than zero. After each piece
    progress is reported in MB, and other threads can have a turn.
    """
    found: dict[str, tuple[bool, bool]] = {}
    done, total = 0, sum(array.nbytes for array in parameters.values())
    for piece in _pieces(parameters):
        found |= _states_of(piece)
        done += sum(array.nbytes for array in piece.values())
        report_progress("Reading weights (MB)", done // 10**6, total // 10**6)
        pass_turn()
    return {name: found[name] for name in parameters if name in found}


def _pieces(parameters: dict[str, mx.array]) -> Iterator[dict[str, mx.array]]:
    """Yield all parameters in order, in dicts of at most PIECE bytes together, or of one parameter that is larger."""
    piece: dict[str, mx.array] = {}
    size = 0
    for name, array in parameters.items():
        if piece and size + array.nbytes > PIECE:
            yield piece
            piece, size = {}, 0
        piece[name] = array
        size += array.nbytes
    yield piece


def _states_of(parameters: dict[str, mx.array]) -> dict[str, tuple[bool, bool]]:
    """Evaluate parameters together; return the two bools of `_states` for those of floating-point numbers."""
    types = {array.dtype for array in parameters.values() if mx.issubdtype(array.dtype, mx.floating)}
    parts = [{name: w for name, w in parameters.items() if w.dtype == dtype} for dtype in types]
    states = [trained(*part.values()) for part in parts]
    mx.eval(list(parameters.values()), states)
    found: dict[str, Any] = {}
    for part, state in zip(parts, states, strict=True):
        found |= zip(part, np.array(state).T.tolist(), strict=True)
    return found


def nan_codes(path: str, module: nn.Module) -> dict[str, mx.array]:
    """Return, by parameter path, lazy bools: whether 8-bit scales or MXFP8 weights of a quantized module contain NaN.

    Of block formats, whether scales contain NaN or infinity. {} for affine formats and unquantized modules.
    """
    found, mode = {}, getattr(module, "mode", "affine")
    if mode == "affine" or "scales" not in module:
        return {}
    if isinstance(module, Blocks):
        return {f"{path}.scales": ~mx.isfinite(block_scales(module["scales"], mode)).all()}
    for name, codes in (("scales", module["scales"]), ("weight", module["weight"].view(mx.uint8))):
        if name == "scales" or mode == "mxfp8":
            found[f"{path}.{name}"] = codes.max() == POWER_NAN
            if name == "weight" or mode == "nvfp4":  # float8 e4m3 has two
                found[f"{path}.{name}"] |= codes.view(mx.int8).max() == FLOAT_NAN
    return found


def check_codes(model: nn.Module, place: Callable[[str], tuple[Any, str]], *, heads: bool) -> None:
    """Raise ValueError for codes that `nan_codes` finds in a quantized module of the MTP heads, or outside of them.

    heads: whether the heads' modules are checked, or all others. place: as in `check_numbers`.
    """
    found: dict[str, mx.array] = {}
    for path, module in model.named_modules():
        if path.startswith("mtp.") == heads:
            found |= nan_codes(path, module)
    mx.eval(list(found.values()))
    for name, nan in found.items():
        if nan.item():
            file, raw = place(name)
            raise ValueError(f"{file}: tensor {raw} holds NaN, expected trained weights")


def _depth(name: str) -> str:
    return name.split(".")[1]


def origin(model: Any, contents: Contents, name: str) -> tuple[str, str]:
    """Return the file of the tensor that becomes parameter `name`, and the tensor's name in it.

    If no tensor becomes it, the file is "checkpoint" and the name the parameter's.
    """
    stored = contents.trunk | contents.heads
    for raw, tensor in stored.items():
        if name in model.renamed(raw):
            return str(tensor.file), tensor.stored or raw
    return str(stored[name].file) if name in stored else "checkpoint", name


def expected(model: Any, contents: Contents, path: Path, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the file and tensor name where each missing parameter was expected, in the order of `names`.

    They follow from the model's other layers, else from the family's name rules. path: the checkpoint's directory,
    returned instead of a file if several are possible.
    """
    alike: dict[str, tuple[str, str, str]] = {}
    for part in (contents.heads, contents.trunk):
        file = only({t.file for t in part.values()}, path)
        for raw in part:
            for known in model.renamed(raw):
                alike.setdefault(layerless(known), (file, raw, known))
    return [
        _of_layer(n, *alike[layerless(n)]) if layerless(n) in alike else _by_name(model, contents, path, n)
        for n in names
    ]


def _of_layer(name: str, file: str, raw: str, known: str) -> tuple[str, str]:
    """Return the file and tensor name of parameter `name`, derived from another layer's: `raw` becomes `known`."""
    if not (number := NUMBER.search(name)):
        return file, raw
    of_parameter, of_tensor = (NUMBER.search(n) for n in (known, raw))
    layer = int(of_tensor[1]) - int(of_parameter[1]) + int(number[1])  # type: ignore[index]
    return file, NUMBER.sub(f".{layer}.", raw, count=1)


def _by_name(model: Any, contents: Contents, path: Path, name: str) -> tuple[str, str]:
    """Return the file and tensor name of a parameter that no other layer has, from the family's name rules."""
    name = model.unrenamed(name).replace(".switch_mlp.", ".experts.*.")
    if not name.startswith("mtp."):
        prefix = next((n.partition("layers.")[0] for n in contents.trunk if "layers." in n), "")
        tail = name.partition("layers.")[2]
        return only({t.file for t in contents.trunk.values()}, path), f"{prefix}layers.{tail}" if tail else name
    _, depth, inside = name.split(".", 2)
    prefix = model.spec.before(next(iter(contents.heads), None), int(depth), model.args.num_hidden_layers)
    return only({t.file for t in contents.heads.values()}, path), f"{prefix}{model.spec.stored(inside)}"
