"""Layers in GGUF's block formats compute as dequantized ones, in bounded memory; kernels serve them."""

from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_cases import exact, linux_only, relative_error
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from stand_in import StandIn
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.decoding.replay import Record
from mlx_mtp.kernels import BLOCK_FORMATS, quantized_blocks
from mlx_mtp.kernels import _blocks as pieces
from mlx_mtp.layers import blocks
from mlx_mtp.layers.blocks import place_blocks, to_blocks
from mlx_mtp.layers.lm_head import OwnHead, sliced
from mlx_mtp.layers.mla import OwnPerHead
from mlx_mtp.layers.products import GLU, OwnGLU, OwnStack
from mlx_mtp.tuning import ab_test, kernel_sites, kernel_switch

MODES = [*BLOCK_FORMATS]
SMALL_ERROR = {"iq4_nl": 0.1, "iq4_xs": 0.1, "q6_k": 0.03}  # of normally distributed weights, root mean square


def plain_of(module, kind, *sizes):
    """Return an unquantized module with the same weights."""
    made = kind(*sizes)
    made.weight = module.dequantized()
    if "bias" in module:
        made.bias = module.bias
    return made


def made(kind, *sizes, mode):
    mx.random.seed(sum(sizes))
    found = kind(*sizes)
    found.weight = mx.random.normal(found.weight.shape)
    if "bias" in found:
        found.bias = mx.random.normal(found.bias.shape)
    return to_blocks(found, mode)


@pytest.mark.parametrize("mode", MODES)
def test_quantization_is_near_the_weights_and_its_own_fixed_point(mode):
    mx.random.seed(0)
    linear = nn.Linear(512, 9, bias=False)
    linear.weight = mx.random.normal((9, 512))
    found = to_blocks(linear, mode)
    assert relative_rms(found.dequantized(), linear.weight) < SMALL_ERROR[mode]
    zeros, words = quantized_blocks(mx.zeros((1, 256)), mode)
    assert not pieces.dequantized_blocks(zeros, words, mode).any()
    with pytest.raises(ValueError, match=f"{mode} needs rows of whole blocks"):
        quantized_blocks(mx.zeros((1, 48)), mode)


def relative_rms(a, b):
    return mx.sqrt(mx.square(a - b).mean() / mx.square(b).mean()).item()


@pytest.mark.parametrize("mode", MODES)
def test_layers_compute_as_dequantized(mode):
    x = mx.random.normal((2, 3, 256))
    linear = made(nn.Linear, 256, 70, mode=mode)
    assert relative_error(linear(x), exact(plain_of(linear, nn.Linear, 256, 70)(x))) < 1e-5
    embedding = made(nn.Embedding, 70, 256, mode=mode)
    plain, tokens = plain_of(embedding, nn.Embedding, 70, 256), mx.array([[3, 69], [0, 3]])
    assert mx.array_equal(embedding(tokens), plain(tokens))
    assert relative_error(embedding.as_linear(x), exact(plain.as_linear(x))) < 1e-5
    heads = made(MultiLinear, 256, 32, 3, mode=mode)
    plain = plain_of(heads, MultiLinear, 256, 32, 3)
    x = mx.random.normal((1, 3, 5, 256))
    assert relative_error(heads(x), exact(plain(x))) < 1e-5
    assert relative_error(heads(x[..., :32], transpose=False), exact(plain(x[..., :32], transpose=False))) < 1e-5
    assert embedding.as_linear(x.astype(mx.float16)).dtype == mx.float16


@pytest.mark.parametrize("most", [0, 512])
@pytest.mark.parametrize("mode", sampled(["q6_k"], MODES))
def test_experts_compute_as_dequantized(mode, most, monkeypatch):
    """By pair and by expert, with rows in any order, sorted, and without a row for some experts."""
    monkeypatch.setattr(blocks, "MOST_PAIRS", most)
    monkeypatch.setattr(blocks, "PAIR_WEIGHTS", 3 * 24 * 256)
    experts = made(SwitchLinear, 256, 24, 7, mode=mode)
    plain = plain_of(experts, SwitchLinear, 256, 24, 7)
    x, chosen = mx.random.normal((1, 5, 1, 1, 256)), mx.array([[[5, 0], [0, 5], [2, 6], [6, 6], [0, 2]]])
    assert (experts.input_dims, experts.output_dims, experts.num_experts) == (256, 24, 7)
    assert relative_error(experts(x, chosen), exact(plain(x, chosen))) < 1e-5
    rows, sorted_ = mx.random.normal((6, 1, 256)), mx.array([0, 0, 2, 2, 5, 6])
    assert relative_error(experts(rows, sorted_, sorted_indices=True), exact(plain(rows, sorted_))) < 1e-5


def test_a_recorded_step_groups_no_rows_by_expert(monkeypatch):
    """Their numbers would have to be evaluated, which MLX refuses while it records; later calls may do so again."""
    monkeypatch.setattr(blocks, "MOST_PAIRS", 0)
    experts = made(SwitchLinear, 256, 8, 3, mode="q6_k")
    x, chosen = mx.random.normal((4, 1, 1, 256)), mx.array([[2, 0], [0, 2], [2, 2], [1, 0]])
    grouped = experts(x, chosen)
    assert relative_error(Record.of(experts).step(x, chosen), exact(grouped)) < 1e-6
    assert mx.array_equal(experts(x, chosen), grouped)


@pytest.mark.parametrize("mode", sampled(["q6_k"], MODES))
def test_memory_of_a_product_is_bounded(mode, monkeypatch):
    """Pieces are computed one after the other, also those of experts, by pair and by expert."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 16)
    monkeypatch.setattr(blocks, "PAIR_WEIGHTS", 1 << 16)
    head, x = made(nn.Linear, 256, 1 << 13, mode=mode), mx.random.normal((2, 256))
    experts, chosen = made(SwitchLinear, 256, 512, 32, mode=mode), mx.arange(16).reshape(2, 8)
    mx.eval(head.parameters(), experts.parameters(), x, chosen)
    routed = partial(experts, x[:, None, None], chosen)
    for call, most in ((partial(head, x), 0), (routed, 16), (routed, 0)):
        monkeypatch.setattr(blocks, "MOST_PAIRS", most)
        whole = 4 << 21  # bytes of the dequantized weights
        mx.eval(call())
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(call())
        assert mx.get_peak_memory() - before < whole / 4


def test_layers_are_found_by_their_scales():
    model = nn.Sequential(nn.Linear(256, 8), nn.Linear(256, 8), nn.Embedding(8, 256))
    weights = {}
    for i, mode in enumerate(MODES):
        weights[f"layers.{i}.weight"], weights[f"layers.{i}.scales"] = quantized_blocks(mx.ones((8, 256)), mode)
    place_blocks(model, {**weights, "norm.weight": mx.zeros(1, mx.bfloat16)})
    assert [(type(m), m.mode) for m in model.layers] == [
        (blocks.BlockLinear, "iq4_nl"), (blocks.BlockLinear, "iq4_xs"), (blocks.BlockEmbedding, "q6_k")
    ]  # fmt: skip
    assert model.layers[2](mx.array([1])).dtype == mx.bfloat16
    assert model.layers[0].to_quantized(group_size=32, bits=4, mode="iq4_nl") is model.layers[0]
    with pytest.raises(ValueError, match=r"layers.0.scales has shape \(8, 7\)"):
        place_blocks(nn.Sequential(nn.Linear(256, 8)), {**weights, "layers.0.scales": mx.zeros((8, 7), mx.uint16)})


def mlp(mode):
    module = nn.Module()
    module.gate_proj, module.up_proj = (made(nn.Linear, 256, 16, mode=mode) for _ in range(2))
    for linear in (module.gate_proj, module.up_proj):
        linear.pop("bias")
    module.gate_proj.site = OwnStack([module.gate_proj, module.up_proj])
    return module


SITES = {
    "verify_qmm": lambda mode: OwnStack([made(nn.Linear, 256, 9, mode=mode)]),
    "verify_glu": lambda mode: OwnGLU(mlp(mode)),
    "verify_qmm_heads": lambda mode: OwnPerHead(made(MultiLinear, 256, 9, 2, mode=mode), heads_first=True),
    "verify_qmm_heads, rows first": lambda mode: OwnPerHead(
        made(MultiLinear, 256, 9, 2, mode=mode), heads_first=False
    ),
    "verify_head": lambda mode: OwnHead(made(nn.Embedding, 64, 256, mode=mode)),
}


def trial(site, rows):
    return next(t for t in kernel_switch.trials([site], mx.float32) if t.rows == rows)


@linux_only
@pytest.mark.parametrize("name", SITES)
def test_trials_accept_kernels_also_of_one_row(name, quick_trials):
    """They compare bits with the kernel's own on one row, and errors with those of the dequantized product."""
    site, op = SITES[name]("iq4_xs"), name.partition(",")[0]
    assert site.op == op
    with emulator.emulated(emulator.Options(traffic=False)):
        for rows in sampled([3], [1, 3]):
            assert ab_test.check(trial(site, rows)) is None
    assert trial(site, 1).key == (op, f"{site.shape} float32", 1)
    assert site.own_bits


@linux_only
def test_a_head_of_fewer_rows_and_its_tokens():
    """A reduced draft vocabulary keeps the rows as they are; where the kernel is on, it chooses the token."""
    head, x = made(nn.Embedding, 64, 256, mode="q6_k"), mx.random.normal((3, 256))
    rows = mx.array([5, 0, 63, 7, 9, 11, 13, 15])
    part = sliced(head, rows)
    assert mx.array_equal(part.dequantized(), head.dequantized()[rows])
    assert mx.array_equal(part(x), head.as_linear(x)[:, rows])
    for module in (head, part):
        site = OwnHead(module)
        with emulator.emulated(emulator.Options(traffic=False)) as launches:
            tokens = site.tokens(x, fused=True)
            assert mx.array_equal(tokens, site.tokens(x, fused=False))
        assert [launch.kernel for launch in launches] == ["verify_head", "verify_head_merge"]


def test_modules_get_the_sites_of_block_formats():
    """Others would compare bits with kernels that MLX lacks, and be rejected."""
    heads = [made(MultiLinear, 256, 9, 2, mode="iq4_xs") for _ in range(2)]
    found = list(kernel_sites._per_head(SimpleNamespace(embed_q=heads[0], unembed_out=heads[1])))
    assert [(type(site), site.heads_first) for site in found] == [(OwnPerHead, True), (OwnPerHead, False)]
    linears = [made(nn.Linear, 256, n, mode="q6_k") for n in (9, 12)]
    assert [type(site) for site in kernel_sites._stack(linears)] == [OwnStack]
    assert [linear.index for linear in linears] == [0, 1]


def spoilt(right, change, x, split):
    return [change(y, len(x)) for y in right(x, split)]


@linux_only
def test_trials_reject_a_wrong_kernel(monkeypatch):
    site = SITES["verify_qmm"]("iq4_xs")
    right = site.computed
    scaled, by_rows = (lambda y, rows: y * 1.01), (lambda y, rows: y + rows * 1e-4)
    for wrong in (partial(spoilt, right, scaled), partial(spoilt, right, by_rows)):
        monkeypatch.setattr(site, "computed", wrong)
        assert ab_test.check(trial(site, 3))


def test_a_refused_kernel_is_a_reason(monkeypatch):
    """A load then uses the dequantized product."""
    refusing = StandIn(refuses=lambda op, template: "evaluate")
    site = SITES["verify_qmm"]("q6_k")
    with emulator.emulated(), monkeypatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", refusing)
        assert ab_test.check(trial(site, 3)).startswith("fails with")


def test_kernels_of_one_row_make_a_row_exact():
    site = SITES["verify_qmm"]("q6_k")
    assert 1 in site.candidates
    site.rows = frozenset(range(2, 9))
    assert kernel_switch.rows_not_exact([site]) == ("1 layers' verify_qmm at M=1",)
    assert issubclass(OwnGLU, GLU)
