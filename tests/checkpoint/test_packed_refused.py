"""Refuse damaged packed weights, and variants that are not supported, in one line that names the tensor or method."""

import copy
import functools
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import packed_files as files
import pytest
from packed_kinds import KINDS, compressed, linears, write
from portless import CONFIGS
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.checkpoint.quant_methods import method_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
MODULE = "model.layers.1.self_attn.q_proj"
HEAD = "model.mtp_layers.0.self_attn.v_proj"
STARCODER = json.dumps(CONFIGS["starcoder2"])


@functools.cache
def contents(name: str, family: str) -> tuple[dict, dict[str, files.Stored]]:
    """config.json and the tensors of a packed checkpoint."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path, _ = write(Path(folder), family, linears(kind), kind.config)
        content, config = (path / "model.safetensors").read_bytes(), json.loads((path / "config.json").read_text())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    tensors = {}
    for tensor, entry in header.items():
        begin, end = (8 + size + n for n in entry["data_offsets"])
        values = np.frombuffer(content[begin:end], f"V{files.TYPES[entry['dtype']]}").reshape(entry["shape"])
        tensors[tensor] = files.Stored(entry["dtype"], values)
    return config, tensors


def packed(tmp_path, name: str, family: str = "mimo"):
    """Return (a checkpoint directory, its config, its tensors)."""
    config, tensors = contents(name, family)
    return files.save(tmp_path / "packed", config, tensors), copy.deepcopy(config), tensors


def refused(path, *parts: str) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        mlx_mtp.load_model(path)
    text = str(error.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text


def fill(tensor: files.Stored, value: int) -> files.Stored:
    values = np.full((*tensor.values.shape, files.TYPES[tensor.dtype]), value, np.uint8)
    return files.Stored(tensor.dtype, values.view(f"V{files.TYPES[tensor.dtype]}")[..., 0])


CUT = {  # by format: tensors without which a weight is incomplete
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "compressed": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "scales"),
    "int4": ("weight_packed", "weight_scale"),
}
CUTS = [(name, suffix) for name, suffixes in CUT.items() for suffix in suffixes]


@pytest.mark.parametrize(("name", "suffix"), sampled(CUTS[::3], CUTS))
def test_a_missing_tensor_of_a_weight(tmp_path, name, suffix):
    path, config, tensors = packed(tmp_path, name)
    for module in (MODULE, HEAD):
        left = {n: t for n, t in tensors.items() if n != f"{module}.{suffix}"}
        files.save(path, config, left)
        refused(path, "missing", f"{module}.")


@pytest.mark.parametrize(("name", "suffix"), sampled(CUTS[1::4], CUTS))
def test_a_tensor_of_another_shape(tmp_path, name, suffix):
    path, config, tensors = packed(tmp_path, name)
    found = tensors[f"{MODULE}.{suffix}"]
    shape = (
        (*found.values.shape, 2) if found.values.ndim < 2 else (found.values.shape[0] + 3, *found.values.shape[1:])
    )
    files.save(
        path, config, tensors | {f"{MODULE}.{suffix}": files.Stored(found.dtype, np.resize(found.values, shape))}
    )
    refused(path, f"{MODULE}.")


@pytest.mark.parametrize("name", sampled(["modelopt"], KINDS))
def test_weights_of_other_widths_than_config_jsons(tmp_path, name):
    path, config, tensors = packed(tmp_path, name)
    files.save(path, config | {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8}, tensors)
    refused(path, "model.safetensors: tensor ", "expects")


NAN = [("modelopt", "weight_scale", 127), ("modelopt", "weight_scale", 255), ("modelopt", "weight_scale_2", 255)]
NAN += [("compressed", "weight_global_scale", 255), ("mxfp8", "weight_scale_inv", 255), ("mxfp8", "weight", 127)]
NAN += [("mxfp4", "weight_scale", 255), ("gptq", "scales", 255), ("fp8", "weight_scale", 255)]
NAN += [("fp8 rows", "weight_scale", 255), ("fp8 rows", "weight", 127)]


@pytest.mark.parametrize(("name", "suffix", "value"), sampled([*NAN[:1], *NAN[3:6], NAN[-1]], NAN))
def test_numbers_that_are_none(tmp_path, name, suffix, value):
    path, config, tensors = packed(tmp_path, name)
    for module in (MODULE, HEAD):
        name = f"{module}.{suffix}"
        files.save(path, config, tensors | {name: fill(tensors[name], value)})
        refused(path, f"{path}/model.safetensors: tensor {name} holds NaN, expected trained weights")
        with pytest.raises(ValueError, match="holds NaN"):
            convert(path, tmp_path / "new")


def test_a_reciprocal_scale_of_zero(tmp_path):
    path, config, tensors = packed(tmp_path, "compressed")
    name = f"{MODULE}.weight_global_scale"
    files.save(path, config, tensors | {name: fill(tensors[name], 0)})
    refused(path, f"tensor {name} holds", "expected trained weights")


@pytest.mark.parametrize("family", ["mimo", STARCODER])
def test_gptq_in_another_order_is_refused_by_name(tmp_path, family):
    """Whatever config.json states; rows of a single group have no order."""
    path, config, tensors = packed(tmp_path, "gptq", family)
    name = next(n for n in tensors if n.endswith("g_idx"))
    order = np.arange(32, dtype=np.int32) % 2
    files.save(path, config, tensors | {name: files.Stored("I32", order)})
    refused(
        path, f"{path}: quantized by GPTQ (gptq), which is not supported", name, "act-order", "`mlx-mtp convert -q`"
    )
    assert any("act-order" in problem for problem in inspect_checkpoint(path).problems)
    config["quantization_config"]["desc_act"] = True
    files.save(path, config, tensors)
    assert mlx_mtp.load_model(path, mtp=False).report.target_quantization.startswith("4-bit")


VARIANTS = {
    "AWQ in GEMV's layout": ("awq", {"version": "gemv"}, "AWQ (awq)"),
    "AWQ in 3 bits": ("awq", {"bits": 3}, "AWQ (awq)"),
    "GPTQ in 5 bits": ("gptq", {"bits": 5}, "GPTQ (gptq)"),
    "GPTQ for Marlin": ("gptq", {"checkpoint_format": "marlin"}, "GPTQ (gptq)"),
    "other groups than stated": ("gptq", {"group_size": 16}, "expected groups of 16, as config.json states"),
    "3 bits": ("int4", compressed("pack-quantized", num_bits=3), "compressed-tensors"),
    "no pattern": (
        "int4",
        {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}},
        "groups or patterns cannot be read",
    ),
    "no groups": ("int4", {"config_groups": [1]}, "groups or patterns cannot be read"),
    "no list": ("int4", {"ignore": 5}, "groups or patterns cannot be read"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_method(tmp_path, variant):
    name, changes, named = VARIANTS[variant]
    path, config, tensors = packed(tmp_path, name)
    files.save(path, config | {"quantization_config": config["quantization_config"] | changes}, tensors)
    refused(path, f"{path}", named)


def test_algorithms_of_modelopt_are_named(tmp_path):
    """Scales of the inputs (AWQ), and 8-bit integers."""
    path, config, tensors = packed(tmp_path, "modelopt")
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    files.save(path, config, tensors | {f"{MODULE}.pre_quant_scale": files.plain(np.ones(32))})
    refused(path, "quantized by modelopt (NVFP4_AWQ), which is not supported", "pre_quant_scale")
    layers = {MODULE: {"quant_algo": "W8A8_SQ_PER_CHANNEL"}}
    config["quantization_config"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    integers = {f"{MODULE}.weight": files.Stored("U8", np.ones((32, 32), np.uint8))._replace(dtype="I8")}
    files.TYPES.setdefault("I8", 1)
    left = {n: t for n, t in tensors.items() if not n.startswith(f"{MODULE}.")}
    files.save(path, config, left | integers | {f"{MODULE}.weight_scale": files.plain(np.ones(32))})
    refused(path, "quantized by modelopt (W8A8_SQ_PER_CHANNEL), which is not supported")


def test_a_damaged_file_of_modelopts(tmp_path):
    path, config, _ = packed(tmp_path, "modelopt")
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    for text in ("{", "[]", '{"quantization": 3}'):
        (path / "hf_quant_config.json").write_text(text)
        refused(path, f"{path}/hf_quant_config.json: ")


def test_the_method_in_a_config_does_not_depend_on_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("{", '{"quantization": {"quant_method": "awq"}}'):
        (tmp_path / "hf_quant_config.json").write_text(text)
        assert method_of({}) is None
        assert method_of({"text_config": {"quantization_config": {"quant_method": "gptq"}}}) == "gptq"


@pytest.mark.parametrize("name", ["gptq", "ue8m0 128"])
def test_inspecting_a_hubs_headers_reads_no_values(tmp_path, name):
    """Files of headers with holes for the data, as `inspect REPO` makes them."""
    path, _, _ = packed(tmp_path, name)
    file = path / "model.safetensors"
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    text = json.dumps(
        header | {"model.rotary_emb.inv_freq": {"dtype": "F32", "shape": [1 << 18], "data_offsets": [0, 0]}}
    ).encode()
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    text = text.replace(b'"data_offsets": [0, 0]', b'"data_offsets": [%d, %d]' % (end, end + (1 << 20)))
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + end + (1 << 20))
    facts = inspect_checkpoint(path, values=False)
    assert facts.report.target_quantization.startswith(KINDS[name].formats)
