"""A new head has the target's types and the format that was asked for, whatever heads the model had before."""

import families
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.tuned import write_heads
from mlx_mtp.layers.with_heads import TUNED
from mlx_mtp.training import heads

BEFORE = {"float16": None, "8 bits": {"bits": 8}, "mxfp4": {"mode": "mxfp4"}, "mxfp8": {"mode": "mxfp8"}}
INTEGERS = {"weight": mx.uint32, "d2t": mx.int32}


def divides(path, module):
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return families.build("mimo", tmp_path_factory.mktemp("mimo"))[0]


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("before", BEFORE)
def test_new_heads_have_the_targets_types(before, bits, checkpoint, tmp_path):
    """In memory, in the file and after `load`; `head` has the target's own LM-head rows."""
    model = mlx_mtp.load_model(checkpoint, kernels="off")
    for head in model.mtp:
        head.set_dtype(mx.float16)
        if BEFORE[before] is not None:
            nn.quantize(head, group_size=32, class_predicate=divides, **BEFORE[before])
    workshop = heads.new(model, list(range(8)), 1, bits, mx.float32)
    model.mtp = workshop.finished()
    write_heads(model, tmp_path / "mtp.safetensors", {})
    stored = mx.load(str(tmp_path / "mtp.safetensors"))
    loaded = mlx_mtp.load_model(checkpoint, kernels="off", mtp_path=tmp_path / "mtp.safetensors")
    assert loaded.spec.prefix == TUNED.prefix
    for found in (stored, *(dict(tree_flatten(made.mtp[0].parameters())) for made in (model, loaded))):
        quantized = {name.rpartition(".")[0] for name in found if name.endswith(".scales")}
        assert bool(quantized) == (bits is not None)
        for name, w in found.items():
            module, _, kind = name.rpartition(".")
            whole = kind in INTEGERS and (kind == "d2t" or module in quantized)
            assert w.dtype == (INTEGERS[kind] if whole else mx.float32), name
