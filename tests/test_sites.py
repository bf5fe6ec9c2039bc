"""Every family with all sites on computes what mlx-lm's modules compute: on a CPU the kernels' references run."""

from collections import Counter

import families
import mlx.nn as nn
import pytest
import tiny

import mlx_mtp
from mlx_mtp import sites

WIDTHS = {"moe_intermediate_size": 32}
ATTENDED = {
    "deepseek_v3": "verify_latent_attention",
    "glm4_moe": "verify_attention",
    "glm4_moe_lite": "verify_latent_attention",
    "mimo": "verify_attention",
    "mimo_v2_flash": "verify_attention",
    "nemotron_h": "verify_attention",
    "qwen3_5": "verify_attention",
    "qwen3_5_moe": "verify_attention",
    "qwen3_next": "verify_attention",
    "step3p5": "verify_attention",
}
MIXED = set(ATTENDED) - {"mimo", "qwen3_5", "nemotron_h"}


def load(name, path):
    """A tiny model of a family with quantized experts."""
    if name == "step3p5":
        config = {**tiny.CONFIG, **WIDTHS, "swiglu_limits": [0, 0, 0, 0.5]}
        tiny.save(path, config, tiny.random_weights(config))
    elif name == "qwen3_5_moe":
        families.build(name, path, text_config={**families.FAMILIES[name].config["text_config"], **WIDTHS})
    else:
        families.build(name, path, **(WIDTHS if name in MIXED else {}))
    model = mlx_mtp.load_model(path)
    nn.quantize(model, 32, 8, class_predicate=lambda path, m: path.endswith("_proj") and "switch_mlp" in path)
    return model


def test_what_has_a_site(tmp_path):
    """Attention and experts of each layer and head; sums within and between layers, but not behind a head's block."""
    found = Counter(site.op for site in sites.place(load("step3p5", tmp_path)))
    layers, heads = tiny.CONFIG["num_hidden_layers"], 3
    assert found["verify_attention"] == found["norm_rope"] == layers + heads
    assert found["verify_moe"] == layers - 1
    assert found["add_norm"] == 2 * layers + heads


def text_of(model, k):
    steps = mlx_mtp.generate_step([1, 2, 3, 4, 1, 2], model, max_tokens=24, num_draft_tokens=k, prefill_step_size=5)
    return [token for token, _, _ in steps]


@pytest.mark.parametrize("name", sorted(ATTENDED))
def test_text_with_all_sites_on(name, tmp_path):
    model = load(name, tmp_path)
    text, found = text_of(model, 0), sites.place(model)
    for site in found:
        site.rows = frozenset(site.candidates)
    assert [text_of(model, k) for k in (0, 2)] == [text] * 2
    ops = Counter(site.op for site in found)
    assert ops[ATTENDED[name]] == len(model.mtp) + sum(window != "recurrent" for window in model.windows())
    assert (ops["verify_moe"] > 0) is (name in MIXED)
