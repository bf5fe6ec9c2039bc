"""Compare every family with all sites on with mlx-lm's modules; on a CPU the kernels' references run."""

from collections import Counter
from dataclasses import replace

import families
import lora
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from headed import build_headed
from metal_cases import linux_only
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.utils import linear_to_lora_layers
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp import emulator
from mlx_mtp.cache.growing import LinearKVCache
from mlx_mtp.cache.kinds import make_cache
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.cache.recurrent import RecurrentCache
from mlx_mtp.cache.ring import Ring
from mlx_mtp.checkpoint.adapters import load_adapters
from mlx_mtp.layers.attention import Attention
from mlx_mtp.layers.experts import Mixture
from mlx_mtp.layers.kernel_site import inexact_rows
from mlx_mtp.tuning import ab_test, kernel_sites, kernel_switch, kernel_trials

WIDTHS = {"moe_intermediate_size": 32}
ATTENDED = {
    "deepseek_v3": "verify_latent_attention",
    "glm4_moe": "verify_attention",
    "glm4_moe_lite": "verify_latent_attention",
    "mimo": "verify_attention",
    "mimo_v2_flash": "verify_attention",
    "nemotron_h": "verify_attention",
    "nemotron_h_latent": "verify_attention",
    "qwen3_5": "verify_attention",
    "qwen3_5_moe": "verify_attention",
    "qwen3_next": "verify_attention",
    "step3p5": "verify_attention",
}
LATENT = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite")
LATENT_EXPERTS = {"moe_latent_size": 32}
PER_HEAD = {"kv_lora_rank": 32, "qk_nope_head_dim": 32}  # what can be quantized
QUANTIZED = ("_proj", "fc1", "fc2", "embed_q", "unembed_out")
QWEN3 = {
    **{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
    **{"max_position_embeddings": 512, "tie_word_embeddings": True},
}
MIXED = set(ATTENDED) - {"mimo", "qwen3_5"}


def load(name, path):
    """A tiny model of a family with quantized experts."""
    if name == "step3p5":
        config = {**tiny.CONFIG, **WIDTHS, "swiglu_limits": [0, 0, 0, 0.5]}
        tiny.save(path, config, tiny.random_weights(config))
    elif name == "qwen3_5_moe":
        families.build(name, path, text_config={**families.FAMILIES[name].config["text_config"], **WIDTHS})
    else:
        changes = dict(WIDTHS) if name in {*MIXED, *LATENT} else {}
        changes |= PER_HEAD if name in LATENT else LATENT_EXPERTS if name == "nemotron_h_latent" else {}
        families.build(name, path, **changes)
    model = mlx_mtp.load_model(path)

    def chosen(path, module):
        return path.endswith(QUANTIZED) and ("switch_mlp" in path or not path.endswith("_proj"))

    nn.quantize(model, 32, 8, class_predicate=chosen)
    return model


def test_which_modules_have_a_site(tmp_path):
    """Attention and experts of each layer and head; sums within and between layers, but not after a head's block."""
    model = load("step3p5", tmp_path)
    found = Counter(site.op for site in kernel_sites.place(model))
    layers, heads = tiny.CONFIG["num_hidden_layers"], 3
    assert found["verify_attention"] == found["norm_rope"] == layers + heads
    assert found["verify_moe"] == layers - 1
    assert found["add_norm"] == 2 * layers + heads
    following = [*(layer.input_layernorm for layer in model.layers[1:]), model.model.norm]
    assert all(layer.after.norm is norm for layer, norm in zip(model.layers, following, strict=True))
    assert all(head.block.after is None for head in model.mtp)


def test_a_norm_uses_only_the_sum_before_it(tmp_path):
    model = load("mimo", tmp_path)
    kernel_sites.place(model)
    total, norm = model.layers[0].middle, model.layers[0].post_attention_layernorm
    total.rows = frozenset({2})
    x, r = mx.random.normal((2, 1, 2, 32))
    h = total(x, r)
    assert mx.allclose(norm(x), mx.fast.rms_norm(x, norm.weight, norm.eps))
    h = total(x, r)
    assert mx.allclose(norm(h), mx.fast.rms_norm(x + r, norm.weight, norm.eps))
    assert total.read == (None, None)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("on_the_host", [False, True])
def test_attention_of_a_cache_that_begins_late(window, on_the_host):
    """Positions before `start` are empty, as in the cache of an MTP head."""
    module, x = qwen3.Attention(qwen3.ModelArgs.from_dict(QWEN3)), mx.random.normal((1, 9, 64))
    (attention, *_), outputs = kernel_sites._attention(module, window and Ring(window), ()), []
    for rows in (frozenset(), frozenset({3})):
        attention.rows, cache = rows, make_cache(window, start=4)
        cache.seek(4, 4)
        module(x[:, :6], cache.make_mask(6), cache)
        if not on_the_host:
            cache.seek(mx.array([10]), 20)
        outputs.append(module(x[:, 6:], cache.make_mask(3), cache))
    assert mx.allclose(*outputs, atol=1e-5)


@linux_only
@pytest.mark.parametrize("window", [None, 12])
def test_attention_is_tried_over_caches_of_every_format(window, monkeypatch, quick_trials):
    monkeypatch.setattr(Attention, "OFFSET", 30)
    monkeypatch.setattr(Attention, "SLOTS", 256)
    module = qwen3.Attention(qwen3.ModelArgs.from_dict(QWEN3))
    plain, *quantized, placing = kernel_sites._attention(module, window and Ring(window), kernel_sites.KV_BITS)
    assert placing.op == "norm_rope"
    assert module.attention.of(make_cache(window, bits=4, group_size=32)) is quantized[1]
    assert module.attention.of(make_cache(window, bits=4, group_size=64)) is None
    ops = [trial.op for trial in kernel_switch.trials([*quantized, plain], mx.float16)]
    assert ops[:8] == ["verify_attention"] * 8  # quantized caches come last
    for site in sampled([quantized[0] if window else plain], (plain, *quantized)):
        tried = next(t for t in kernel_switch.trials([site], mx.float16) if t.rows == 3)
        (ours, stock), alone = tried.pairs[0], tried.alone[0]
        with emulator.emulated(emulator.Options(traffic=False)) as launches:
            assert ab_test.check(tried) is None
            scaled = [lambda x, op=op: [1.1 * op(x)[0]] for op in (ours, alone)]
            wrong = replace(tried, pairs=[(scaled[0], stock)], alone=scaled[1:])
            assert "errs by" in ab_test.check(wrong)
        assert {launch.kernel for launch in launches} == {"verify_attention", "attention_merge"}


def test_attention_is_on_by_the_length_of_a_sequence(monkeypatch):
    """The length at the start of an answer counts; a window has one length."""
    module, dtype = qwen3.Attention(qwen3.ModelArgs.from_dict(QWEN3)), mx.float16
    plain, *_ = kernel_sites._attention(module, None, ())
    windowed, *_ = kernel_sites._attention(qwen3.Attention(qwen3.ModelArgs.from_dict(QWEN3)), Ring(12), ())
    tried, checked = kernel_switch.trials([plain, windowed], dtype), []
    monkeypatch.setattr(kernel_trials, "check", lambda trial: checked.append(trial.shape))
    monkeypatch.setattr(kernel_trials, "compile_kernel", lambda trial: None)
    verdicts = kernel_trials.decide(tried, lane=None, timer=lambda t: 2.0 if "from 16384" in t.shape else 0.9)
    kernel_switch.switch([plain, windowed], verdicts, dtype)
    base = "4/2x32 float16"
    assert {t.shape for t in tried} == {
        *(base, f"{base} below 1024 positions", f"{base} from 16384 positions"),
        "4/2x32 window 12 float16",
    }
    at = PromptCache(None, [make_cache(None)], [make_cache(None)], None, [])
    for length, on in ((5, False), (1024, False), (16383, False), (16384, True), (99999, True)):
        at.begin(length)
        assert [plain.serves_rows(3, c) for c in at.caches] == [on, on]
        assert not windowed.serves_rows(3, at.layers[0])
    assert inexact_rows(plain) == set(plain.candidates)
    plain.rows = frozenset()
    assert not plain.serves_rows(3, at.layers[0])


def test_trials_read_contexts_of_their_length(monkeypatch):
    plain, *_ = kernel_sites._attention(qwen3.Attention(qwen3.ModelArgs.from_dict(QWEN3)), None, ())
    read = []
    monkeypatch.setattr(Attention, "fused", lambda self, q, cache, *_: read.append(cache.limit) or q[0])
    for trial in kernel_switch.trials([plain], mx.float16):
        if trial.rows == 2:
            trial.pairs[0][0](trial.x(0))
    assert read == [2008, 508, 20008]


def decoded(model, k):
    """Return the tokens and the acceptance of each depth, after windows have wrapped."""
    windows, stats = [w for w in model.windows() if isinstance(w, int)], mlx_mtp.Stats()
    more = {"max_tokens": 44 if windows else 10, "num_draft_tokens": k, "adaptive": False, "prefill_step_size": 5}
    steps = mlx_mtp.generate_step([1, 2, 3, 4, 1, 2], model, stats=stats, **more)
    return [token for token, _, _ in steps], stats.acceptance


def text_of(model, k, prompt=(1, 2, 3, 4, 1, 2), **options):
    options = {"max_tokens": 12, "num_draft_tokens": k, "adaptive": False, "prefill_step_size": 5} | options
    steps = mlx_mtp.generate_step([*prompt], model, **options)
    return [token for token, _, _ in steps]


def all_on(model):
    found = kernel_sites.place(model)
    for site in found:
        site.rows = frozenset(site.candidates)
    return found


def attentions(model):
    return len(model.mtp) + sum(window is not RecurrentCache for window in model.windows())


# One of each kind of attention and experts; the sites of all are compared with MLX's modules below.
FEW = ("deepseek_v32", "nemotron_h_latent")


@pytest.mark.parametrize("name", sampled(FEW, sorted({*ATTENDED, *LATENT})))
def test_text_and_drafts_with_all_sites_on(name, tmp_path):
    model = load(name, tmp_path)
    before, found = [decoded(model, k) for k in (0, 2)], all_on(model)
    assert [decoded(model, k) for k in (0, 2)] == before
    ops = Counter(site.op for site in found)
    assert name not in ATTENDED or ops[ATTENDED[name]] == attentions(model)
    assert ops["verify_qmm_heads"] == (2 * attentions(model) if name in LATENT else 0)
    if "verify_latent_attention" in ops:
        assert ops["norm_rope"] == ops["verify_latent_attention"]
    assert (ops["verify_moe"] > 0) is (name in MIXED or name in LATENT)


def test_text_with_a_drafter_and_all_sites_on(tmp_path):
    """The drafter's attention also has a kernel, and reads twice the width."""
    model = build_headed("eagle", tmp_path)
    text, found = text_of(model, 0), all_on(model)
    assert [text_of(model, k) for k in (0, 1)] == [text] * 2
    assert Counter(site.op for site in found)["verify_attention"] == attentions(model)


def test_latent_rows_in_a_ring_are_read_by_mlx(tmp_path):
    """With `max_kv_size`: position p is not in slot p, and the ring is full before the sequence ends."""
    model = load("deepseek_v3", tmp_path)
    options = {"max_tokens": 14, "max_kv_size": 8, "prompt": [1, 2, 3, 4, 1, 2] * 6}
    text = text_of(model, 0, **options)
    all_on(model)
    assert [text_of(model, k, **options) for k in (0, 1)] == [text] * 2


PROJECTIONS = [f"self_attn.{letter}_proj" for letter in "qkvo"]


ADAPTED = [("step3p5", PROJECTIONS), ("qwen3_next", PROJECTIONS), ("qwen3_next", ["mlp.gate"])]


@pytest.mark.parametrize(("adapted", "placed_first"), sampled([(ADAPTED[1], True)], paired(ADAPTED, [False, True])))
def test_adapters_around_modules_with_sites(adapted, placed_first, tmp_path):
    """Added with the model, as by `adapter_path`, or after the sites, around projections or a router."""
    name, keys = adapted
    model = load(name, tmp_path)
    found = kernel_sites.place(model) if placed_first else []
    linear_to_lora_layers(model, 8, {"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": keys})
    adapters = [module for module in model.modules() if "lora_b" in module]
    for module in adapters:
        module.lora_b = mx.random.normal(module.lora_b.shape) * 0.1
    found = found or kernel_sites.place(model)
    text = text_of(model, 0)
    for site in found:
        site.rows = frozenset(site.candidates)
    assert adapters
    assert {Attention, Mixture} <= {type(site) for site in found}
    assert [text_of(model, k) for k in (0, 1)] == [text] * 2


def test_an_adapter_selected_after_the_sites_were_placed(tmp_path):
    """Sites of modules that it replaces step aside while it is selected, and serve the model alone again."""
    model = load("mimo", tmp_path / "model")
    names = ("q_proj", "o_proj", "up_proj", "lm_head")
    load_adapters(model, {"one": lora.save(tmp_path / "one", model, 1, names)})
    found, adapters = kernel_sites.place(model), model.runtime.adapters
    texts = {}
    for name in (None, "one"):
        adapters.select(name)
        texts[name] = text_of(model, 0)
    for site in found:
        site.rows = frozenset(site.candidates)
    for name in ("one", None, "one"):
        adapters.select(name)
        assert [text_of(model, k) for k in (0, 1)] == [texts[name]] * 2
    assert texts["one"] != texts[None]


def test_other_caches_and_batches_use_mlxs_attention(tmp_path):
    """The kernel needs a cache's whole buffer, and rows of a single sequence."""
    model = load("mimo", tmp_path)
    batch = mx.array([[1, 2], [3, 4]])

    def outputs():
        return [
            model.model(x, [make() for _ in model.layers])
            for x, make in ((batch[:1], KVCache), (batch, LinearKVCache))
        ]

    expected = outputs()
    all_on(model)
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(outputs(), expected, strict=True))


@linux_only
def test_attention_serves_the_formats_of_its_kernel():
    """For other formats the reference would run, whose bits depend on the number of rows."""
    site, *_ = kernel_sites._attention(qwen3.Attention(qwen3.ModelArgs.from_dict(QWEN3)), None, kernel_sites.KV_BITS)
    rows = mx.random.normal((1, 2, 1, 32))
    served = {}
    with emulator.emulated():
        for bits in (None, 3, 4, 6, 8):
            cache = make_cache(None, bits=bits, group_size=32)
            cache.update_and_fetch(rows, rows)
            known = site.of(cache)
            served[bits] = known is not None and known.serves(rows, cache)
        assert not known.serves(rows.astype(mx.bfloat16), cache)
    assert served == {None: True, 3: False, 4: True, 6: False, 8: True}


@linux_only
@pytest.mark.parametrize("name", ["qwen3_5", "mimo"])
def test_operations_that_are_not_exact_without_kernels(name, tmp_path):
    model = load(name, tmp_path)
    with emulator.emulated():
        _, not_exact = kernel_switch.switch_on(model, "off")
    assert ("the gated delta rule" in not_exact) is (name == "qwen3_5")
    assert {"all products", "attention"} <= {*not_exact}


@pytest.mark.parametrize(
    ("rows", "lines"), [((), ()), (range(1, 9), ()), ((1, 2, 3), ("1 layers' verify_head at M=4, 5, 6, 7, 8",))]
)
def test_a_head_that_is_on_for_some_rows_is_listed(rows, lines, tmp_path):
    """The sum of all exponentials, which a draw among the first n reads, has other bits in MLX."""
    head = next(site for site in kernel_sites.place(load("mimo", tmp_path)) if site.op == "verify_head")
    head.rows = frozenset(rows)
    assert kernel_switch.rows_not_exact([head]) == lines


COMPARED = ["deepseek_v3", "nemotron_h_latent", "qwen3_5_moe", "step3p5"]  # have every kind of site


@pytest.mark.parametrize("name", sampled(COMPARED, [*COMPARED, "glm4_moe", "mimo_v2_flash", "qwen3_5"]))
def test_sites_compute_what_mlxs_modules_do(name, tmp_path):
    """The check of a load cannot find an error that the kernel and its truth share; this can."""
    mx.random.seed(0)
    for site in kernel_sites.place(load(name, tmp_path)):
        x = mx.random.normal((3, site.width))
        for ours, stock in zip(site.ours(x), site.stock(x), strict=True):
            assert mx.allclose(ours, stock, rtol=1e-3, atol=1e-4 * mx.abs(stock).max().item()), (site.op, site.shape)


def test_experts_within_adapters_are_mlxs(tmp_path):
    model = load("step3p5", tmp_path)
    found = all_on(model)
    text = text_of(model, 0)
    keys = [f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")]
    linear_to_lora_layers(model, 8, {"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": keys})
    adapters = [module for module in model.modules() if "lora_b" in module]
    for module in adapters:
        module.lora_b = mx.random.normal(module.lora_b.shape)
    adapted = text_of(model, 0)
    for site in found:
        site.rows = frozenset()
    assert adapters
    assert text_of(model, 0) == adapted != text
