"""Convert blocks of GGUF's types to MLX's form: codes, scales and biases of groups of 32 weights.

A weight is scale * code + bias, bit for bit in float32. Sources: ggml's `ggml-quants.c`, and the `gguf` package's
`quants.py`, with which the tests compare.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

GROUP = 32
SUPER = 8  # groups in a block of the K types
# Values of the 4-bit codes of IQ4_NL and IQ4_XS.
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


class Groups(NamedTuple):
    """Groups of 32 weights: codes uint8 [rows, columns], scales and biases float32 [rows, columns / 32].

    Of MXFP4, scales are the bytes of exponents, uint8, and biases None. Of block formats (Q6_K in groups of 16),
    scales are the words of `kernels/_blocks.py`, uint16 [rows, words], and biases None.
    """

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None

    def values(self) -> np.ndarray:
        """Return the weights in float32, [rows, columns]; AssertionError without biases."""
        assert self.biases is not None
        grouped = self.codes.reshape(*self.scales.shape, GROUP).astype(np.float32)
        return (self.scales[..., None] * grouped + self.biases[..., None]).reshape(self.codes.shape)


def _half(bytes_: np.ndarray) -> np.ndarray:
    """Return float16 numbers, as bytes [blocks, 2 n], in float32 [blocks, n]."""
    return np.ascontiguousarray(bytes_).view(np.float16).astype(np.float32)


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Return the low halves of bytes [..., n], followed by the high halves: [..., 2 n]."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def _one_scale(b: np.ndarray, bits: int, *, minimum: bool) -> Groups:
    """Return blocks, uint8 [blocks, bytes], of Q4_0, Q4_1, Q5_0 or Q5_1 as `Groups`.

    A block has a scale, a minimum (in _1), 32 high bits (in Q5), and the low halves of codes. bits: 4 or 5. minimum:
    whether blocks have one.
    """
    d, codes, begin = _half(b[:, :2]), _nibbles(b[:, -16:]), 4 if minimum else 2
    if bits == 5:
        codes |= np.unpackbits(np.ascontiguousarray(b[:, begin:-16]), axis=-1, bitorder="little") << 4
    return Groups(codes, d, _half(b[:, 2:4]) if minimum else -(2 ** (bits - 1)) * d)


def _centred(codes: np.ndarray, scales: np.ndarray) -> Groups:
    """Return codes of 8 bits, of which 128 stands for 0, as `Groups`."""
    return Groups(codes, scales, -128 * scales)


def _k(b: np.ndarray, bits: int) -> Groups:
    """Return blocks, uint8 [blocks, bytes], of Q4_K or Q5_K as `Groups`: codes [blocks, 8, 32], scales [blocks, 8].

    A block has a float16 number that multiplies 8 scales of 6 bits, another that multiplies 8 minima of 6 bits, high
    bits (in Q5), and the low halves of codes. bits: of a code, 4 or 5.
    """
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    codes = _nibbles(b[:, -128:].reshape(-1, 4, GROUP)).reshape(-1, SUPER, GROUP)
    if bits == 5:
        codes |= (b[:, None, 16:48] >> np.arange(SUPER, dtype=np.uint8)[:, None] & 1) << 4
    return Groups(codes, _half(b[:, :2]) * scales, -(_half(b[:, 2:4]) * mins))


def _nonlinear(codes: np.ndarray, scales: np.ndarray) -> Groups:
    """Return nonlinear 4-bit codes as `Groups` with codes of 8 bits."""
    return _centred((NONLINEAR + 128).astype(np.uint8)[codes], scales)


def _xs_factors(b: np.ndarray) -> np.ndarray:
    """Return the factors of IQ4_XS blocks' groups, int8 [blocks, 8]."""
    groups = np.arange(SUPER, dtype=np.uint16)
    low = b[:, 4:8].repeat(2, axis=-1) >> (groups % 2 * 4).astype(np.uint8) & 15
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> (2 * groups) & 3
    return ((low | high << 4).astype(np.int16) - 32).astype(np.int8)


def _xs_codes(b: np.ndarray) -> np.ndarray:
    return _nibbles(b[:, 8:].reshape(-1, SUPER, 16))


def _iq4_xs(b: np.ndarray) -> Groups:
    return _nonlinear(_xs_codes(b), _half(b[:, :2]) * _xs_factors(b))


def six_bits(b: np.ndarray) -> np.ndarray:
    """Return the codes of Q6_K blocks, uint8 [blocks, 256]; a weight is its group's scale times (code - 32)."""
    low = b[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return (low.reshape(-1, 2, 4, 32) | high << 4).reshape(len(b), -1)


def _records(codes: np.ndarray, numbers: np.ndarray, factors: np.ndarray) -> Groups:
    """Return a block format's `Groups`, whose scales are the block's words, uint16 [blocks, words].

    The words contain the bytes of `numbers`, uint8 [blocks, 2] (a float16 number), and then `factors`, int8 or uint8.
    """
    words = np.ascontiguousarray(np.concatenate([numbers, factors.view(np.uint8)], axis=-1)).view("<u2")
    return Groups(codes, words, None)


class Exact(NamedTuple):
    """A GGUF type whose weights fit a format exactly.

    bits: of a code in the format. nbytes: bytes of a block. groups: number of groups of 32 weights in a block. read:
    returns blocks, uint8 [blocks, nbytes], as `Groups`. rounds: whether float16 can round the scales. mode: the
    format's name.
    """

    bits: int
    nbytes: int
    groups: int
    read: Callable[[np.ndarray], Groups]
    rounds: bool = False
    mode: str = "affine"


EXACT = {
    "Q4_0": Exact(4, 18, 1, partial(_one_scale, bits=4, minimum=False)),
    "Q4_1": Exact(4, 20, 1, partial(_one_scale, bits=4, minimum=True)),
    "Q5_0": Exact(5, 22, 1, partial(_one_scale, bits=5, minimum=False)),
    "Q5_1": Exact(5, 24, 1, partial(_one_scale, bits=5, minimum=True)),
    "Q8_0": Exact(8, 34, 1, lambda b: _centred(b[:, 2:] ^ 128, _half(b[:, :2]))),
    "Q4_K": Exact(4, 144, SUPER, partial(_k, bits=4), rounds=True),
    "Q5_K": Exact(5, 176, SUPER, partial(_k, bits=5), rounds=True),
    "IQ4_NL": Exact(8, 18, 1, lambda b: _nonlinear(_nibbles(b[:, 2:]), _half(b[:, :2]))),
    "IQ4_XS": Exact(8, 136, SUPER, _iq4_xs, rounds=True),
    "MXFP4": Exact(4, 17, 1, lambda b: Groups(_nibbles(b[:, 1:]), b[:, :1], None), mode="mxfp4"),
}


# The types that our kernels read as they are, in the block formats of `kernels`.
PACKED = {
    "IQ4_NL": Exact(4, 18, 1, lambda b: _records(_nibbles(b[:, 2:]), b[:, :2], b[:, :0]), mode="iq4_nl"),
    "IQ4_XS": Exact(4, 136, SUPER, lambda b: _records(_xs_codes(b), b[:, :2], _xs_factors(b)), mode="iq4_xs"),
    "Q6_K": Exact(6, 210, SUPER, lambda b: _records(six_bits(b), b[:, 208:], b[:, 192:208]), mode="q6_k"),
}


def groups_of(kind: str, rows: np.ndarray, *, packed: bool = False) -> Groups:
    """Return the `Groups` of rows of blocks, uint8 [rows, bytes of a row], of the GGUF type `kind`, a key of EXACT.

    packed: `kind` is a key of PACKED instead, and the result has its block format.
    """
    form, n = (PACKED if packed else EXACT)[kind], len(rows)
    codes, scales, biases = form.read(np.ascontiguousarray(rows).reshape(-1, form.nbytes))
    return Groups(codes.reshape(n, -1), scales.reshape(n, -1), None if biases is None else biases.reshape(n, -1))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes uint8 [rows, columns] packed as in MLX: uint32 [rows, columns * bits / 32].

    The first code has the lowest bits. columns: a multiple of 32. bits: 2, 4, 5, 6 or 8.
    """
    rows = len(codes)
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits in (2, 4):
        count = 8 // bits
        packed = codes[:, ::count].copy()
        for i in range(1, count):
            packed |= codes[:, i::count] << (bits * i)
        return packed.view("<u4")
    pairs = codes[:, ::2] | codes[:, 1::2].astype(np.uint16) << bits
    fours = pairs[:, ::2] | pairs[:, 1::2].astype(np.uint32) << 2 * bits
    eights = fours[:, ::2] | fours[:, 1::2].astype(np.uint64) << np.uint64(4 * bits)
    words = np.ascontiguousarray(eights).view(np.uint8).reshape(rows, -1, 8)[..., :bits]
    return np.ascontiguousarray(words).reshape(rows, -1).view("<u4")
