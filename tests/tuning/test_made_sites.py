"""Kernels on made ports: which modules have sites, and that texts and bits stay with all of them on."""

from collections import Counter
from dataclasses import replace
from types import FunctionType

import families
import mlx.core as mx
import mlx.nn as nn
import model_types
import pytest
import tiny
from exact import same_bits
from metal_cases import linux_only
from mlx_lm.generate import generate_step as mlx_lm_steps
from mlx_lm.models import gemma, helium, llama4, olmo2, qwen3, starcoder2
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import create_attention_mask
from oracle_drafts import OracleDrafts
from portless import CONFIGS, SIZES
from quantized_models import quantized
from stock_ops import stock_ops
from sweep import sampled

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.layers.made import Made
from mlx_mtp.layers.same_calls import SameCalls, gated_call
from mlx_mtp.tuning import kernel_switch
from mlx_mtp.tuning.kernel_trials import ASKED, KernelVerdict

pytestmark = linux_only
PROMPT, TOKENS = [1, 2, 3, 4, 5, 6, 1, 2], 8
OF_KERNELS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 16}
FAMILIES = {
    "starcoder2": CONFIGS["starcoder2"] | OF_KERNELS | {"num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt_oss": CONFIGS["gpt_oss"] | OF_KERNELS | {"layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": SIZES | OF_KERNELS | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": SIZES | OF_KERNELS | {"model_type": "olmo2"},
}
# Per layer q, k and v share a site, and so do gate and up; mlx-lm's experts have none.
PRODUCTS = {"starcoder2": 2 * 4 + 1, "gpt_oss": 2 * 3 + 1, "mixtral": 2 * 3 + 1, "olmo2": 2 * 4 + 1}

ATTENTION = ("norm_rope", "verify_attention", "verify_attention of 8-bit caches", "verify_attention of 4-bit caches")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Checkpoints with 4-bit weights by family."""
    path = tmp_path_factory.mktemp("made")
    return {family: save(path / family, config) for family, config in FAMILIES.items()}


def save(path, config):
    directory, _ = families.headless(path / "whole", config)
    weights = quantized(dict(mx.load(str(directory / "model.safetensors"))), mx.float32)
    return tiny.save(path / "target", config | {"quantization": {"group_size": 32, "bits": 4}}, weights)


def load(path):
    return mlx_mtp.load_model(path, kernels="off", mtp=False)


def ops_of(family):
    attention = Counter(dict.fromkeys(ATTENTION, 2)) if family == "starcoder2" else Counter()
    return +Counter(verify_qmm=PRODUCTS[family], verify_glu=2 * (family == "olmo2"), verify_head=1) + attention


def rows_of(model):
    """Hidden rows with the streams of both layers, and what the model makes of them."""
    rows = model.hidden(mx.array([PROMPT]), mlx_mtp.make_prompt_cache(model).layers)
    return rows, model.logits(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_which_modules_have_sites(paths, family, monkeypatch):
    model = load(paths[family])
    monkeypatch.setattr(Made, "taps", (0, 1, 2))
    before, head = rows_of(model), model.form.head
    sites = kernel_switch.place(model)
    assert Counter(site.op for site in sites) == ops_of(family)
    assert all(map(same_bits, rows_of(model), before))
    assert model.unembedding() is head is head.choice.module


@pytest.mark.parametrize("family", sampled(["starcoder2"], FAMILIES))
def test_the_text_and_the_bits_of_rows(paths, family, monkeypatch):
    model = load(paths[family])
    text = [int(token) for token, _ in mlx_lm_steps(mx.array(PROMPT), model, max_tokens=TOKENS)]
    for site in kernel_switch.place(model):
        site.rows = frozenset(site.every_count)
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, {len(PROMPT) + 2, len(PROMPT) + 5}))
    with emulator.emulated(emulator.Options(traffic=False)) as launches, stock_ops():
        (finding,) = mlx_mtp.check_rows(model, contexts=(0,), exact=True).values()
        assert finding == (16, "")
        how = {"num_draft_tokens": 3, "adaptive": False, "compile_cycles": False}
        assert [token for token, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=TOKENS, **how)] == text
    assert {op for op in ops_of(family) if " " not in op} <= {launch.kernel for launch in launches}


TYPES = [name for name in model_types.model_types() if name not in model_types.NOT_RUN]


@pytest.mark.parametrize("model_type", sampled(["granite"], TYPES))
def test_every_type_keeps_its_text(model_type, tmp_path, monkeypatch):
    """With the kernels' references, as on a CPU."""
    model = load(model_types.save(tmp_path, model_types.tiny_config(model_type)))
    if not isinstance(model, Made):
        pytest.skip("no made port")
    text = [token for token, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=TOKENS)]
    for site in kernel_switch.place(model):
        site.rows = frozenset(site.every_count)
    assert [token for token, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=TOKENS)] == text
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, PROMPT + text, {len(PROMPT) + 2, len(PROMPT) + 5}))
    how = {"num_draft_tokens": 3, "adaptive": False}
    assert [token for token, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=TOKENS, **how)] == text


def test_the_report_of_a_load(paths, monkeypatch):
    on = KernelVerdict(True, True, reason=ASKED)
    monkeypatch.setattr(kernel_switch, "decide", lambda trials, **_: {trial.key: on for trial in trials})
    with emulator.emulated():
        made = mlx_mtp.load_model(paths["gpt_oss"], kernels="exact", mtp=False)
        plain = mlx_mtp.load_model(paths["gpt_oss"], kernels="exact", mtp=False, lazy=True)
    shapes = ["128+64+64x64", "64x128", "4x64", "16x64", "16x64"]
    lane, *kernels = made.report.kernels
    assert lane == "lane exact: asked for"
    assert sorted(line.split()[1] for line in kernels) == sorted(shapes)
    assert all(line.endswith("on (asked for)") for line in kernels)
    assert made.report.not_exact == ("attention", "everything in mlx-lm's model without a kernel")
    assert (plain.report.kernels, plain.report.not_exact) == (("none: decoded one row at a time",), ())


def test_a_model_without_streams(paths):
    """Its tied embedding is not known to be the LM head."""
    model = load(paths["starcoder2"])
    model.form = replace(model.form, layers=(), head=None, norm=None)
    assert ops_of("starcoder2") - Counter(site.op for site in kernel_switch.place(model)) == {
        "verify_qmm": 1,
        "verify_head": 1,
    }


@pytest.mark.parametrize(("changed", "attentions"), [(lambda mask: mask, 2), (lambda mask: mask & True, 0)])
def test_attention_with_another_mask_stays_as_it_is(paths, monkeypatch, changed, attentions):
    def made_mask(*given):
        mask = create_attention_mask(*given)
        return changed(mask) if isinstance(mask, mx.array) else mask

    monkeypatch.setattr(starcoder2, "create_attention_mask", made_mask)
    model = load(paths["starcoder2"])
    assert isinstance(model, Made)
    assert len(model.form.attentions) == attentions


class Inherited(qwen3.MLP):
    pass


class Doubled(qwen3.MLP):
    def __call__(self, x) -> mx.array:
        return 2 * super().__call__(x)


class OtherGlobals(qwen3.MLP):
    __call__ = FunctionType(gated_call.__code__, {"swiglu": mx.add})


class OtherOrder(qwen3.MLP):
    def __call__(self, x) -> mx.array:
        return self.down_proj(swiglu(self.up_proj(x), self.gate_proj(x)))


@pytest.mark.parametrize(
    ("kind", "same"),
    [
        *((kind, True) for kind in (qwen3.MLP, llama4.MLP, helium.HeliumMLP, olmo2.MLP, Inherited)),
        *((kind, False) for kind in (starcoder2.MLP, gemma.MLP, Doubled, OtherGlobals, OtherOrder, nn.Module)),
    ],
)
def test_classes_with_the_same_calls(kind, same):
    assert (kind in SameCalls([gated_call])) == same
