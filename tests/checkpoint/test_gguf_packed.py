"""Keep IQ4_NL, IQ4_XS and Q6_K of a GGUF file packed: values, sizes, damage, and conversions of the result."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from command_line import call, one_line_error
from gguf_samples import coded_file, dequantized

import mlx_mtp
from mlx_mtp.checkpoint.gguf import header, plan
from mlx_mtp.checkpoint.gguf.blocks import PACKED
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.plan import GGUFOptions
from mlx_mtp.layers.blocks import Blocks
from mlx_mtp.models.gguf.family import TensorChange

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    return coded_file(tmp_path_factory.mktemp("coded"))


@pytest.fixture(scope="module")
def packed(coded, tmp_path_factory):
    """A transcoding of the file."""
    path = tmp_path_factory.mktemp("packed") / "new"
    transcode(prepare(coded), path)
    return path


def test_sizes_are_those_of_the_file_and_shown_before(coded):
    prepared = prepare(coded)
    rows = {row.kind: row for row in prepared.rows}
    assert {kind: row.form.mode for kind, row in rows.items()} == {"IQ4_XS": "iq4_xs", "Q6_K": "q6_k", "F32": ""}
    assert all(row.loss is None and row.after < 1.02 * row.before for kind, row in rows.items() if kind != "F32")
    for choice in ("affine", "exact"):
        assert prepare(coded, GGUFOptions(plan=choice)).nbytes > 1.3 * prepared.nbytes
    stdout = call("inspect", coded).stdout
    assert "Q6_K 66% (0.81 MB, 15 tensors) as q6_k, packed, 0.81 MB" in stdout
    assert "mlx_mtp, not mlx-lm (iq4_xs, q6_k); --gguf-plan affine" in stdout


def test_weights_and_memory_are_those_of_the_file(coded, packed, tmp_path):
    transcode(prepare(dequantized(coded, tmp_path / "plain.gguf"), GGUFOptions(float32=True)), tmp_path / "plain")
    plain = dict(mlx_mtp.load_model(tmp_path / "plain", lazy=True).named_modules())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = mlx_mtp.load_model(packed)
    stored = (packed / "model.safetensors").stat().st_size
    assert mx.get_peak_memory() - before < 1.5 * stored
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Blocks)}
    assert {type(module).__name__ for module in blocks.values()} == {"BlockLinear", "BlockEmbedding"}
    for name, module in blocks.items():
        assert mx.array_equal(module.dequantized(), plain[name].weight)


def test_a_conversion_keeps_the_formats(packed, tmp_path):
    listed = json.loads((packed / "config.json").read_text())["quantization"]
    assert (listed["mode"], listed[UP]["mode"]) == ("iq4_xs", "q6_k")
    for options in (("--dtype", "bfloat16", "-q"), ("--dequantize",)):
        result = call("convert", "--hf-path", packed, *options, "--mlx-path", tmp_path / options[0])
        assert result.returncode == 0, result.stderr
        warned = "weights in iq4_xs, q6_k are read by mlx_mtp, not by mlx-lm" in result.stderr
        assert warned is (options[0] == "--dtype")
    paths = packed, tmp_path / "--dtype", tmp_path / "--dequantize"
    model, cast, dense = (mlx_mtp.load_model(path, lazy=True) for path in paths)
    tokens = mx.array([[1, 2]])
    assert cast(tokens).dtype == mx.bfloat16
    assert all(
        mx.array_equal(module.scales, modules[name].scales)
        for modules in [dict(cast.named_modules())]
        for name, module in model.named_modules()
        if isinstance(module, Blocks)
    )
    assert not any(isinstance(module, Blocks) for module in dense.modules())
    assert mx.array_equal(model(tokens).argmax(axis=-1), dense(tokens).argmax(axis=-1))
    line = one_line_error(call("inspect", packed, "--ranks", 2))
    assert "weights in GGUF's block formats cannot be split; --gguf-plan affine" in line
    stdout = call("inspect", packed).stdout
    assert "4-bit iq4_xs g32 (17 modules), 6-bit q6_k g16 (15 modules)" in stdout


def test_numbers_that_are_not_finite(coded, packed, tmp_path):
    place = coded.read_bytes().find(header.read(coded).tensors["blk.0.ffn_up.weight"].blocks()[:1].tobytes())
    damaged = bytearray(coded.read_bytes())
    damaged[place + 208 : place + 210] = np.float16("nan").tobytes()
    (tmp_path / "x.gguf").write_bytes(damaged)
    line = one_line_error(call("convert", "--gguf", tmp_path / "x.gguf", "--mlx-path", tmp_path / "new"))
    assert "tensor blk.0.ffn_up.weight holds NaN or infinity" in line
    arrays = mx.load(str(packed / "model.safetensors"))
    arrays[f"{UP}.scales"][3, 0] = 0x7C00
    (tmp_path / "bad").mkdir()
    mx.save_safetensors(str(tmp_path / "bad/model.safetensors"), arrays)
    (tmp_path / "bad/config.json").write_bytes((packed / "config.json").read_bytes())
    with pytest.raises(ValueError, match=rf"model.safetensors: tensor {UP}.scales holds NaN"):
        mlx_mtp.load_model(tmp_path / "bad")


def test_which_parameters_stay_packed(coded):
    """Those of one type, unchanged; of IQ4_NL also with its groups in another order."""
    (entry,) = [e for name, e in header.read(coded).tensors.items() if name == "blk.0.ffn_up.weight"]
    entries = {kind: replace(entry, kind=kind) for kind in (*PACKED, "Q4_K")}
    groups = np.arange(256).reshape(-1, 32)[::-1].reshape(-1)

    def modes(change, choice="packed"):
        forms = (plan._packed((entries[kind],), change, GGUFOptions(plan=choice)) for kind in entries)
        return [form and form.mode for form in forms]

    assert modes(TensorChange()) == ["iq4_nl", "iq4_xs", "q6_k", None]
    assert modes(TensorChange(columns=groups)) == ["iq4_nl", None, None, None]
    assert modes(TensorChange(columns=np.arange(256)[::-1])) == [None] * 4
    assert modes(TensorChange(values=np.abs)) == [None] * 4
    for choice in ("affine", "exact", "small"):
        assert modes(TensorChange(), choice) == [None] * 4
    assert plan._packed((entries["Q6_K"], entries["IQ4_XS"]), TensorChange(), GGUFOptions()) is None
