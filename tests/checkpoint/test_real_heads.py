"""The shipped heads draft for SmolLM2-135M-Instruct: the text of mlx_lm and transformers, in fewer passes."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from served import serving
from sweep import sweep

import mlx_mtp
from mlx_mtp.checkpoint.smollm2 import smollm2
from mlx_mtp.demo import SHIPPED_HEADS
from mlx_mtp.serve.server import Loaded

PROMPTS = (
    "What is photosynthesis?",
    "Write a Python function that reverses a string.",
    "Write a short poem about the sea.",
    "Anna has 12 apples and buys 7 more. What is their number now?",
)
TOKENS = 48


@pytest.fixture(scope="module")
def checkpoint():
    return smollm2()


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return mlx_mtp.load(checkpoint)


@pytest.fixture(scope="module")
def prompts(loaded):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [loaded[1].apply_chat_template(chat, add_generation_prompt=True) for chat in chats]


@pytest.fixture(scope="module")
def plain(checkpoint, prompts):
    """mlx_lm's greedy answers."""
    model, tokenizer = mlx_lm.load(str(checkpoint))
    return [mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS) for prompt in prompts]


@sweep
def test_text_is_mlx_lms_and_three_of_ten_drafts_are_right(loaded, prompts, plain):
    model, tokenizer = loaded
    accepted = drafted = 0
    for prompt, expected in zip(prompts, plain, strict=True):
        options = {"max_tokens": TOKENS, "num_draft_tokens": 1, "adaptive": False, "prompt_lookup": False}
        *_, last = mlx_mtp.stream_generate(model, tokenizer, prompt, **options)
        assert mlx_mtp.generate(model, tokenizer, prompt, **options) == expected
        accepted, drafted = accepted + sum(last.stats.accepted), drafted + sum(last.stats.drafted)
    assert accepted > 0.3 * drafted


@sweep
def test_a_seed_draws_the_same_text_with_and_without_drafts(loaded, prompts):
    model, tokenizer = loaded
    for prompt in prompts[:2]:
        options = {"max_tokens": TOKENS, "temp": 0.8, "seed": 5, "adaptive": False}
        texts = {mlx_mtp.generate(model, tokenizer, prompt, num_draft_tokens=k, **options) for k in (0, 1, 3)}
        assert len(texts) == 1


@sweep
def test_batched(loaded, prompts, plain):
    model, tokenizer = loaded
    assert mlx_mtp.batch_generate(model, tokenizer, prompts, max_tokens=TOKENS).texts == plain


@sweep
def test_served(checkpoint, plain):
    started = serving(lambda: Loaded(*mlx_mtp.load(checkpoint), {}, {"kv_group_size": 32}), names=("smollm2",))
    with started as client:
        for prompt, expected in zip(PROMPTS, plain, strict=True):
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == expected


@sweep
def test_text_is_transformers(loaded, checkpoint, prompts, plain, tmp_path):
    torch = pytest.importorskip("torch", reason="needs mlx-mtp[parity]")
    transformers = pytest.importorskip("transformers", "5.23", reason="needs mlx-mtp[parity]")
    mlx_mtp.convert(checkpoint, tmp_path / "wide", dequantize=True)
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    for prompt, expected in zip(prompts, plain, strict=True):
        with torch.no_grad():
            found = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
        assert loaded[1].decode(found[0, len(prompt) :].tolist(), skip_special_tokens=True) == expected


@sweep
@pytest.mark.parametrize("form", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"q_bits": 8}, {"q_bits": 4}])
def test_conversions_find_the_heads(form, checkpoint, tmp_path):
    wide = {"dequantize": True} if "dtype" in form else {"quantize": True}
    source = checkpoint
    if "q_bits" in form:
        mlx_mtp.convert(checkpoint, tmp_path / "wide", dequantize=True)
        source = tmp_path / "wide"
    mlx_mtp.convert(source, tmp_path / "made", **wide, **form)
    model, tokenizer = mlx_mtp.load(tmp_path / "made")
    assert len(model.mtp) == 1
    prompt = mx.array(tokenizer.encode("The sea is"))
    texts = [
        [int(t) for t, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=24, num_draft_tokens=k, adaptive=False)]
        for k in (0, 2)
    ]
    assert texts[0] == texts[1]


def test_the_shipped_file_is_small_and_states_its_target():
    (file,) = SHIPPED_HEADS
    assert file.stat().st_size < 5_000_000
    tensors, facts = mx.load(str(file), return_metadata=True)
    assert facts["mlx_mtp_sizes"] == "llama 30 576 49152"
    assert {name.split(".")[2] for name in tensors} == {"enorm", "hnorm", "eh_proj", "block", "norm", "d2t"}
