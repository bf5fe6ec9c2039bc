"""Compare every spelling of multiply-adds with MLX's kernels, each side compiled with any contraction."""

import itertools
import re
from functools import partial

import mlx.core as mx
import pytest
from exact import CONTRACTIONS, FORMATS, activation, bits_of, dot, draw, one_row, same_bits
from metal_cases import linux_only
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.bench.kernels_cases import SMALL
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import (
    Gates,
    contraction,
    delta_inputs,
    gated_norm,
    verify_gemv,
    verify_glu,
    verify_head_top,
    verify_qmm,
)
from mlx_mtp.kernels._source import DIRECTORY
from mlx_mtp.kernels._text import kernel_text
from mlx_mtp.kernels.contraction import (
    AS_COMPILED,
    EXPLICIT,
    FOLLOWS,
    KERNELS,
    SPELLINGS,
    kernel_spelling,
    spelled,
)

SPELLED = dict(zip(CONTRACTIONS, EXPLICIT, strict=True))  # the spelling with the bits of a compiler's contraction
OTHER = {"off": "fast", "on": "off", "fast": "on"}
# The emulator's vectors are classes, whose operators are functions: "on" fuses nothing across them.
DOT = {**SPELLED, "on": "SEPARATE"}


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    monkeypatch.setattr(contraction, "_taken", {})
    monkeypatch.setattr(contraction, "_in_use", {})


def compiled(run, fp_contract, op="verify_qmm", spelling=AS_COMPILED):
    """Return a kernel's results in a spelling, compiled with a contraction."""
    with spelled(op, spelling), emulator.emulated(emulator.Options(fp_contract=fp_contract, traffic=False)):
        y = run()
        mx.eval(y)
    return y


def qmm(*form):
    x, w = draw(*form, (20, 384), 3, mx.float32)
    return "verify_qmm", lambda: verify_qmm(x, w)[0], partial(one_row, x, w)


def glu():
    x, w = draw("affine", 5, 32, (24, 320), 3, mx.float32, (12, 24))

    def of_mlx(options):
        gate, up = mx.split(one_row(x, w, options), 2, axis=-1)
        return activation(gate, up, None, options)

    return "verify_glu", lambda: verify_glu(x, w), of_mlx


def gemv(n, k, m):
    x, w = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(((m, k), (n, k))))
    of_mlx = dot if n == 1 else stock.gemv
    more = () if n == 1 else (None,)
    return "verify_gemv", lambda: verify_gemv(x, w), lambda options: of_mlx(x, w, *more, options)[0]


PRODUCTS = {
    **{" ".join(map(str, form)): partial(qmm, *form) for form in FORMATS},
    **{"glu": glu, "gemv": partial(gemv, 13, 203, 3), "dot": partial(gemv, 1, 1024, 12)},
}


@linux_only
@pytest.mark.parametrize("case", sampled(["affine 4 64", "dot"], PRODUCTS))
def test_one_spelling_has_the_bits_of_each_contraction(case):
    """This holds however ours is compiled; AS_COMPILED has the bits if both are compiled alike."""
    op, ours, of_mlx = PRODUCTS[case]()
    wanted = {c: of_mlx(emulator.Options(fp_contract=c)) for c in CONTRACTIONS}
    for theirs, own in sampled(OTHER.items(), itertools.product(CONTRACTIONS, repeat=2)):
        spelling = (DOT if case == "dot" else SPELLED)[theirs]
        assert same_bits(compiled(ours, own, op, spelling), wanted[theirs]), (theirs, own)
    for own in sampled(["on"], CONTRACTIONS):
        assert same_bits(compiled(ours, own, op), wanted[own]), own


@linux_only
def test_another_contraction_changes_most_values():
    """So that none of the comparisons in this file holds by chance."""
    op, ours, of_mlx = qmm("affine", 4, 64)
    wanted = of_mlx(emulator.Options(fp_contract="on"))
    for y in (
        compiled(ours, "off"),
        compiled(ours, "fast", op, "SEPARATE"),
        compiled(ours, "off", op, "FUSED_ACROSS"),
    ):
        assert (bits_of(y) != bits_of(wanted)).mean() > 0.5


def recurrence_inputs():
    """Return inputs of a gated-delta layer; its recurrence itself is compiled as mlx-lm's kernel is."""
    mx.random.seed(0)
    x, before, y = (mx.random.normal(shape) for shape in ((1, 3, 256), (1, 3, 256), (1, 3, 2, 64)))
    gates = Gates(*(mx.random.normal(shape) for shape in ((1, 3, 2), (1, 3, 2), (2,), (2,))))
    found = delta_inputs(x, before, mx.random.normal((256, 4, 1)), gates, key_heads=1, head_dim=64)
    return [*found, gated_norm(y, y, mx.random.normal((64,)), 1e-6)]


def launches_of(op):
    """Launch an op's kernels on float32."""
    if op == "gated_delta_verify":
        return recurrence_inputs
    site = SMALL[op]()
    x = mx.random.normal((3, site.width), key=mx.random.key(0))
    if op == "verify_head":
        return lambda: verify_head_top(x, site.weights, 5)[:1]
    return lambda: site.ours(x)


OPS = [*KERNELS, *FOLLOWS]
FEW = [*zip(OPS, itertools.cycle(EXPLICIT), strict=False)]


@linux_only
@pytest.mark.parametrize(("op", "spelling"), sampled(FEW[::2], itertools.product(OPS, EXPLICIT)))
def test_no_compiler_changes_what_is_spelled_out(op, spelling):
    """Every multiply-add of these kernels has an explicit spelling."""
    run = launches_of(op)
    pairs = zip(*(compiled(run, c, FOLLOWS.get(op, op), spelling) for c in ("off", "fast")), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


@linux_only
@pytest.mark.parametrize(("kernel", "other"), [("verify_head", "verify_qmm"), ("verify_glu", "verify_qmm")])
def test_a_trial_changes_its_own_kernels_only(kernel, other):
    """Kernels with the same products, whose trials do not compare these, follow."""
    with spelled(other, "FUSED"):
        assert kernel_spelling(other) == "FUSED"
        assert kernel_spelling(kernel) == ("FUSED" if kernel in KERNELS[other] else AS_COMPILED)
    assert kernel_spelling(other) == kernel_spelling(kernel) == AS_COMPILED


def test_texts_are_numbered_as_the_spellings():
    text = (DIRECTORY / "contraction.h").read_text()
    assert re.findall(r"int (\w+) = (\d);", text) == [(name, str(i)) for i, name in enumerate(SPELLINGS)]


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.metal")), ids=lambda path: path.stem)
def test_kernels_with_a_spelling_are_those_of_an_op(path):
    header, _ = kernel_text(DIRECTORY, path.stem)
    assert ("CONTRACTION" in header) == any(path.stem in kernels for kernels in KERNELS.values())
