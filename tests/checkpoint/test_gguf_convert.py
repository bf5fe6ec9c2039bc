"""Test GGUF files in the commands convert and inspect and in --model: weights, plans, keys."""

import json
import os
import shutil

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from command_line import call, one_line_error
from gguf_metadata import metadata
from gguf_samples import checkpoint, coded_file, dense, dequantized, written
from mlx.utils import tree_flatten
from sweep import sampled

import mlx_mtp
from mlx_mtp.checkpoint.files import read_config
from mlx_mtp.checkpoint.gguf import cached as caching
from mlx_mtp.checkpoint.gguf import report
from mlx_mtp.checkpoint.gguf.cached import cached, fingerprint
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.plan import GGUFOptions
from mlx_mtp.checkpoint.parameters import named

KINDS = gguf_files.KINDS


pytestmark = pytest.mark.usefixtures("cache")


def values(model):
    """Return the model's parameters, dequantized."""
    found = named(model)
    modules = dict(model.named_modules())
    for path in [path for path in found if path.endswith(".scales")]:
        m = modules[path.removesuffix(".scales")]
        found[f"{path.removesuffix('.scales')}.weight"] = mx.dequantize(
            m.weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode, dtype=mx.float32
        )
    return {
        path: np.array(w.astype(mx.float32)) for path, w in found.items() if not path.endswith(("scales", "biases"))
    }


@pytest.mark.parametrize("kind", sampled([KINDS.Q5_1], [KINDS.Q8_0, KINDS.Q4_0, KINDS.Q5_1, KINDS.F16]))
def test_weights_are_those_of_the_file(kind, tmp_path):
    """Permuted rows, experts and heads dequantize to the file's values, bit for bit."""
    for name in ("qwen3_next", "qwen3_5_moe"):
        _, config, weights = checkpoint(name, tmp_path / "hub")
        file = written(name, tmp_path / "x.gguf", config, weights, kind)
        plain = dequantized(file, tmp_path / "plain.gguf")
        transcode(prepare(file, GGUFOptions(float32=True)), tmp_path / name)
        transcode(prepare(plain), tmp_path / f"{name}-plain")
        ours, true = (values(mlx_mtp.load_model(tmp_path / n, lazy=True)) for n in (name, f"{name}-plain"))
        assert ours.keys() == true.keys()
        for path, w in true.items():
            assert np.array_equal(ours[path], w), path
        shutil.rmtree(tmp_path / "hub")


def test_columns_of_whole_groups_keep_their_codes(tmp_path):
    """Runs of 32 columns of the output of tiled value heads move with their codes and scales."""
    text = {"linear_value_head_dim": 32, "linear_num_value_heads": 4}
    import families
    import qwen

    config = {"model_type": "qwen3_5", "text_config": {**qwen.QWEN["text_config"], **text}}
    weights = families.random_weights(qwen.qwen_trunk(config) | qwen.qwen_heads(config), 0, zero_centred=True)
    tensors = gguf_files.tensors_of(config, weights)
    file = gguf_files.write(tmp_path / "x.gguf", "qwen35", metadata("qwen35", config, 1), tensors, KINDS.Q4_1)
    transcode(prepare(file, GGUFOptions(float32=True)), tmp_path / "new")
    model = mlx_mtp.load_model(tmp_path / "new")
    module = model.layers[0].linear_attn.out_proj
    assert module.bits == 4
    transcode(prepare(dequantized(file, tmp_path / "plain.gguf")), tmp_path / "plain")
    true = mlx_mtp.load_model(tmp_path / "plain").layers[0].linear_attn.out_proj.weight
    made = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
    assert np.array_equal(np.array(made), np.array(true))


def test_convert(step, tmp_path):
    result = call("convert", "--gguf", step[3], "--mlx-path", tmp_path / "new")
    assert result.returncode == 0, result.stderr
    assert "3 MTP heads in it" in result.stdout
    assert "as 8-bit g32, float16 scales" in result.stdout
    assert ": exact" in result.stdout
    assert "computes   in float32: scales are float16" in result.stdout
    assert f"Transcoding {step[3].stat().st_size / 1e6:.2f} MB to " in result.stderr
    model, tokenizer = mlx_mtp.load(tmp_path / "new")
    assert len(model.mtp) == 3
    assert tokenizer.encode("abc") == [12, 2]
    assert mx.load(str(tmp_path / "new/mtp.safetensors"))["model.layers.4.eh_proj.scales"].dtype == mx.float16
    facts = json.loads((tmp_path / "new/config.json").read_text())
    assert facts["eos_token_id"] == [11]


def test_a_file_as_model_is_transcoded_once(step, tmp_path, cache):
    first = call("generate", "--model", step[3], "-p", "ab", "-m", 4, "--ignore-chat-template")
    assert first.returncode == 0, first.stderr
    assert "Transcoding" in first.stderr
    (made,) = cache.iterdir()
    assert made.name.startswith(fingerprint(step[3]))
    stamp = (made / "config.json").stat().st_mtime_ns
    second = call("generate", "--model", step[3], "-p", "ab", "-m", 4, "--ignore-chat-template")
    assert "Transcoding" not in second.stderr
    assert (made / "config.json").stat().st_mtime_ns == stamp
    assert first.stdout.splitlines()[1] == second.stdout.splitlines()[1]
    copy = shutil.copy(step[3], tmp_path / "renamed.gguf")
    assert mlx_mtp.load(copy)[0].report.heads == 3
    assert len(list(cache.iterdir())) == 1
    other = bytearray(step[3].read_bytes())
    other[-1] ^= 1
    (tmp_path / "other.gguf").write_bytes(other)
    mlx_mtp.load_model(tmp_path / "other.gguf", lazy=True)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("metal", "dtype", "scales"),
    [
        (False, None, mx.float32),
        (True, None, mx.float16),
        (False, "float16", mx.float16),
        (True, "float32", mx.float16),
    ],
)
def test_scales_of_a_file_as_model_are_float32_on_a_cpu(step, monkeypatch, metal, dtype, scales):
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    made = mx.load(str(cached(step[3], GGUFOptions(dtype=dtype)) / "mtp.safetensors"))
    assert made["model.layers.4.eh_proj.scales"].dtype == scales


@pytest.mark.parametrize(
    ("metal", "computes", "advised"),
    [(False, "in float16", True), (True, "in float16", False), (False, "in float32", False)],
)
def test_a_conversion_to_float16_on_a_cpu_advises_float32(step, monkeypatch, metal, computes, advised):
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(report, "computes", lambda _: computes)
    text = report.announcement(prepare(step[3]), "new")
    assert text.startswith("Transcoding ")
    assert ("\nFor use on a CPU give --gguf-exact: " in text) == advised


def test_inspect(step, tmp_path):
    result = call("inspect", step[3])
    assert result.returncode == 0, result.stderr
    for message in (
        "step35",
        "3 MTP heads",
        "Q8_0",
        "family     step3p5, 4 layers",
        "memory ",
        "gpt2, pre-tokenizer",
    ):
        assert message in result.stdout, message
    facts = json.loads(call("inspect", step[3], "--json").stdout)
    assert facts["gguf"]["heads"] == facts["depths"] == 3
    assert sum(row["bytes"] for row in facts["gguf"]["types"]) <= facts["gguf"]["bytes"]
    assert "Q8_0" in {row["type"] for row in facts["gguf"]["types"]}
    (tmp_path / "x.gguf").write_bytes(step[3].read_bytes()[:5000])
    assert "truncated" in one_line_error(call("inspect", tmp_path / "x.gguf"))


def test_config_from_a_checkpoint(step, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**step[1], "rope_theta": [7e6, *step[1]["rope_theta"][1:]]}))
    (folder / "chat_template.jinja").write_text("x")
    transcode(prepare(step[3], config_from=folder), tmp_path / "new")
    assert json.loads((tmp_path / "new/config.json").read_text())["rope_theta"][0] == 7e6
    assert (tmp_path / "new/chat_template.jinja").read_text() == "x"
    (folder / "config.json").write_text(json.dumps({**step[1], "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"config\.json: hidden_size is 64; the GGUF file has 32"):
        prepare(step[3], config_from=folder)


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    return coded_file(tmp_path_factory.mktemp("coded"))


def test_plans(coded, tmp_path):
    sizes = {}
    for plan in ("exact", "small"):
        prepared = prepare(coded, GGUFOptions(plan=plan))
        rows = {row.kind: row for row in prepared.rows}
        sizes[plan] = prepared.nbytes
        transcode(prepared, tmp_path / plan)
        mlx_mtp.load_model(tmp_path / plan)
        if plan == "exact":
            assert rows["IQ4_XS"].form.bits == rows["Q6_K"].form.bits == 8
            assert rows["IQ4_XS"].loss.worst < 8e-4
            assert 1e-3 < rows["Q6_K"].loss.rms < 5e-3
            exact = {row.kind: row for row in prepare(coded, GGUFOptions(plan, float32=True)).rows}
            assert exact["IQ4_XS"].loss is None
        else:
            assert (rows["IQ4_XS"].form.bits, rows["Q6_K"].form.bits) == (5, 6)
            assert 1e-2 < rows["IQ4_XS"].loss.rms < 6e-2
    assert sizes["small"] < 0.8 * sizes["exact"]
    result = call("convert", "--gguf", coded, "--gguf-plan", "small", "--mlx-path", tmp_path / "new")
    assert "IQ4_XS" in result.stdout
    assert "error " in result.stdout


def test_flags_that_would_be_without_effect(step, tmp_path):
    for flags, message in (
        (("--gguf", step[3], "-q"), "--quantize: not for a GGUF file"),
        (("--gguf", step[3], "--mtp-q-bits", 8), "--mtp-q-bits: not for a GGUF file"),
        (("--gguf", step[3], "--hf-path", step[0]), "--gguf and --hf-path"),
        (("--hf-path", step[0], "--gguf-exact"), "--gguf-exact: only for a GGUF file"),
        ((), "--hf-path or --gguf is missing"),
    ):
        assert message in one_line_error(call("convert", *flags, "--mlx-path", tmp_path / "new"), code=2)
    result = call("convert", "--gguf", step[3], "--gguf-exact", "--dtype", "float16", "--mlx-path", tmp_path / "new")
    assert "dtype='float16': not together with gguf_exact" in one_line_error(result, code=2)


def test_a_directory_with_a_file_is_named(step, tmp_path):
    shutil.copy(step[3], tmp_path / "x.gguf")
    assert f"name the file itself: {tmp_path}/x.gguf" in one_line_error(call("inspect", tmp_path))


def test_without_the_package(step, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    line = one_line_error(call("convert", "--gguf", step[3], "--mlx-path", tmp_path / "new"))
    assert "gguf is missing: pip install -e '.[gguf]'" in line


def test_an_unknown_architecture(step, tmp_path):
    gguf_files.write(tmp_path / "x.gguf", "falcon", {"block_count": 2}, {"a.weight": np.ones((2, 2))})
    line = one_line_error(call("inspect", tmp_path / "x.gguf"))
    assert "architecture 'falcon' is not supported; supported are deepseek2, gemma3" in line


def test_activations(step, tmp_path):
    """Type of MLX's products for a family that fits float16, and for one that may not."""
    _, config, arch, tensors = dense("qwen3", tmp_path / "hub")
    file = gguf_files.write(tmp_path / "x.gguf", arch, metadata(arch, config, 0), tensors, KINDS.Q8_0)
    for source, options, dtype in (
        (file, GGUFOptions(), mx.float16),
        (file, GGUFOptions(float32=True), mx.float32),
        (file, GGUFOptions(dtype="bfloat16"), mx.bfloat16),
        (step[3], GGUFOptions(), mx.float32),
    ):
        new = tmp_path / "new"
        prepared = prepare(source, options)
        transcode(prepared, new)
        arrays = dict(tree_flatten(mlx_mtp.load_model(new, lazy=True).parameters()))
        assert arrays["model.norm.weight"].dtype == dtype
        scales = arrays["model.layers.0.self_attn.q_proj.scales"].dtype
        assert scales == (mx.float32 if options.float32 else mx.float16)
        shutil.rmtree(new)


READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def test_the_key_of_a_transcoding_is_what_is_read(step, tmp_path, cache, monkeypatch):
    """Neither the name of a directory nor the time counts: the contents of each file that is read there do."""
    config = read_config(transcode(prepare(step[3]), tmp_path / "whole"))
    folder = tmp_path / "a" / "from"
    folder.mkdir(parents=True)
    for name in READ:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    made = [cached(step[3]), cached(step[3], config_from=folder)]
    shutil.copytree(folder, tmp_path / "b" / "from")
    for name in "ab":
        monkeypatch.chdir(tmp_path / name)
        assert cached(step[3], config_from="from") == made[1]
    for name in READ:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "another": 1}))
        made.append(cached(step[3], config_from=folder))
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors.index.json").write_text("{}")  # which is not read
    assert cached(step[3], config_from=folder) == made[1]
    made += [cached(step[3], heads_for=folder)]
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    made += [cached(step[3], heads_for=folder)]
    assert len({*made}) == len(made) == len(list(cache.iterdir()))


def test_a_change_between_the_samples_of_a_large_file_changes_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "WHOLE", 64)
    monkeypatch.setattr(caching, "SAMPLE", 1)
    file = tmp_path / "x.gguf"
    file.write_bytes(bytes(10_000))
    before = fingerprint(file)
    assert fingerprint(file) == before
    with file.open("r+b") as f:
        f.seek(5001)
        f.write(b"1")
    os.utime(file, ns=(1, 1))
    assert fingerprint(file) != before
