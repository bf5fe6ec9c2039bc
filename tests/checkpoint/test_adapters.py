"""Decode with LoRA adapters that mlx-lm trained: the text is that of mlx-lm's model with them."""

import json

import families
import mlx.core as mx
import pytest
import tiny
from letter_chats import make_tokenizer
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from portless import ADAPTER, CONFIGS

import mlx_mtp

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 3, 4, 5]


@pytest.mark.parametrize("name", ["mimo", "qwen3_5", "deepseek_v3", "mamba2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_text_is_that_of_the_adapted_model(tmp_path, name):
    if name in CONFIGS:
        path, plain = families.headless(tmp_path / "model", CONFIGS[name])
    else:
        path, _, plain = families.build(name, tmp_path / "model")
    make_tokenizer()._tokenizer.save_pretrained(path)
    before = tiny.greedy(plain, PROMPT, 6)
    linear_to_lora_layers(plain, ADAPTER["num_layers"], ADAPTER["lora_parameters"])
    mx.random.seed(1)
    weights = {n: mx.random.normal(a.shape) * 0.3 for n, a in tree_flatten(plain.parameters()) if "lora" in n}
    plain.load_weights(list(weights.items()), strict=False)
    plain.eval()
    expected = tiny.greedy(plain, PROMPT, 6)
    assert expected != before
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    (adapter / "adapter_config.json").write_text(json.dumps(ADAPTER))
    model, _ = mlx_mtp.load(path, adapter_path=str(adapter))
    for k in {0, min(3, model.max_draft_tokens)}:
        steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=6, num_draft_tokens=k, adaptive=False)
        assert [token for token, _, _ in steps] == expected
