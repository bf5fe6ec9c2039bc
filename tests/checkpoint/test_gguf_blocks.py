"""Convert blocks of every GGUF type to MLX's groups: exactly if the groups are the same, else with a known error."""

import gguf
import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize
from sweep import sampled

from mlx_mtp.checkpoint.gguf.blocks import EXACT, GROUP, PACKED, Groups, groups_of, pack
from mlx_mtp.checkpoint.gguf.requantize import loss, requantized
from mlx_mtp.kernels import BLOCK_FORMATS, dequantized_blocks

KINDS = gguf_files.KINDS
HALVES = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "MXFP4": []}  # offsets of float16 numbers in blocks
HALVES |= {kind: [0, 2] for kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
IN_FLOAT16 = {"Q4_K": 8e-4, "Q5_K": 8e-4, "IQ4_XS": 8e-4}  # relative to the largest weight; all others are exact
SMALLER = {"Q6_K": (5e-3, 2.5e-2), "Q3_K": (5e-3, 8e-2), "Q2_K": (5e-3, 8e-2), "IQ3_S": (5e-3, 8e-2)}


def random_blocks(kind, rows=8, blocks=4, seed=0):
    """Return random blocks whose scales have the size of real ones, and both signs."""
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[KINDS[kind]][1]
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES.get(kind, [0]):
        scales = rng.uniform(1e-4, 0.1, (rows, blocks)) * rng.choice([-1, 1], (rows, blocks))
        raw[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(rows, blocks, 2)
    if kind == "MXFP4":
        raw[:, :, 0] = rng.integers(90, 150, (rows, blocks))
    return raw.reshape(rows, -1)


def by_mlx(groups, bits, mode="affine", dtype=mx.float32):
    """Return the weights that MLX dequantizes from packed groups."""
    words = mx.array(pack(groups.codes, bits))
    if mode != "affine":
        return np.array(mx.dequantize(words, mx.array(groups.scales), None, GROUP, bits, mode, dtype=mx.float32))
    scales, biases = (mx.array(a).astype(dtype).astype(mx.float32) for a in groups[1:])
    return np.array(mx.dequantize(words, scales, biases, GROUP, bits))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("seed", sampled([0], range(20)))
def test_the_same_weights(kind, seed):
    form, rows = EXACT[kind], random_blocks(kind, seed=seed)
    groups, true = groups_of(kind, rows), dequantize(rows, KINDS[kind])
    assert np.array_equal(by_mlx(groups, form.bits, form.mode), true)
    assert form.groups == gguf.GGML_QUANT_SIZES[KINDS[kind]][0] // GROUP
    if form.mode == "affine":
        assert np.array_equal(groups.values(), true)
        halves = loss(by_mlx(groups, form.bits, dtype=mx.float16), true)
        assert halves.worst <= IN_FLOAT16.get(kind, 0)
        assert (halves.worst > 0) is form.rounds


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("seed", sampled([0], range(20)))
def test_packed_types_have_the_same_weights_in_as_many_bytes(kind, seed):
    rng, rows = np.random.default_rng(seed), random_blocks(kind, rows=8, blocks=8, seed=seed)
    rows = rows[:, : rows.shape[1] // rng.integers(1, 3)]
    form, groups = PACKED[kind], groups_of(kind, rows, packed=True)
    words = pack(groups.codes, form.bits)
    found = np.array(dequantized_blocks(mx.array(words), mx.array(groups.scales), form.mode))
    assert np.array_equal(found, dequantize(rows, KINDS[kind]))
    more = 2 * (rows.size // form.nbytes) if kind == "IQ4_XS" else 0  # its factors have 6 bits, ours 8
    assert words.nbytes + groups.scales.nbytes == rows.nbytes + more
    assert BLOCK_FORMATS[form.mode].bits == form.bits


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 96), dtype=np.uint8)
    ones, zeros = np.ones((3, 3), np.float32), np.zeros((3, 3), np.float32)
    assert np.array_equal(by_mlx(Groups(codes, ones, zeros), bits), codes)


@pytest.mark.parametrize("kind", EXACT)
def test_codes_of_fewer_bits_fit_into_more(kind):
    """This happens when two tensors of different types are joined."""
    groups = groups_of(kind, random_blocks(kind))
    if EXACT[kind].mode == "affine":
        assert np.array_equal(by_mlx(groups, 8), groups.values())


@pytest.mark.parametrize("kind", SMALLER)
def test_the_error_of_what_does_not_fit(kind):
    rows = random_blocks(kind)
    true, (in_eight, in_six) = dequantize(rows, KINDS[kind]), SMALLER[kind]
    assert 0 < loss(by_mlx(requantized(kind, rows, 8), 8), true).rms < in_eight
    assert in_eight < loss(by_mlx(requantized(kind, rows, 6), 6), true).rms < in_six


def test_halves_with_one_scale_are_exact():
    rows = random_blocks("Q6_K")
    scales = rows.reshape(-1, 210)[:, 192:208]
    scales[:, 1::2] = scales[:, ::2]
    assert np.array_equal(by_mlx(requantized("Q6_K", rows, 8), 8), dequantize(rows, KINDS.Q6_K))


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "Q8_0", "IQ4_XS"])
def test_blocks_of_zeros(kind):
    rows = np.zeros_like(random_blocks(kind))
    groups = groups_of(kind, rows) if kind in EXACT else requantized(kind, rows, 8)
    assert not by_mlx(groups, 8).any()
    assert not by_mlx(requantized(kind, rows, 4), 4).any()
