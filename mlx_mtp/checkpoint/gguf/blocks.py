"""Take blocks of GGUF's types apart into codes, scales and biases of groups of 32, MLX's own form.

A weight is scale * code + bias, to the bit in float32. Sources: ggml's `ggml-quants.c` and the `gguf` package's
`quants.py`, which the tests compare with.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

GROUP = 32
SUPER = 8  # groups in a block of the K types
NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)  # codes of IQ4_NL and IQ4_XS


class Groups(NamedTuple):
    """Groups of 32 weights: codes uint8 [rows, columns], scales and biases float32 [rows, columns / 32].

    Of MXFP4 scales are the exponents' bytes, and there are no biases.
    """

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None

    def values(self) -> np.ndarray:
        """Compute the weights in float32."""
        assert self.biases is not None
        grouped = self.codes.reshape(*self.scales.shape, GROUP).astype(np.float32)
        return (self.scales[..., None] * grouped + self.biases[..., None]).reshape(self.codes.shape)


def _half(bytes_: np.ndarray) -> np.ndarray:
    """Read float16 numbers [blocks, n] as float32."""
    return np.ascontiguousarray(bytes_).view(np.float16).astype(np.float32)


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Split bytes [..., n] into the low halves of all, then the high halves: [..., 2 n]."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def _fifth_bits(bytes_: np.ndarray) -> np.ndarray:
    """Return the 32 bits of four bytes [blocks, 4], each as 16 or 0: [blocks, 32]."""
    return np.unpackbits(np.ascontiguousarray(bytes_), axis=-1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> Groups:
    d = _half(b[:, :2])
    return Groups(_nibbles(b[:, 2:]), d, -8 * d)


def _q4_1(b: np.ndarray) -> Groups:
    return Groups(_nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q5_0(b: np.ndarray) -> Groups:
    d = _half(b[:, :2])
    return Groups(_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), d, -16 * d)


def _q5_1(b: np.ndarray) -> Groups:
    return Groups(_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: np.ndarray) -> Groups:
    d = _half(b[:, :2])
    return Groups(b[:, 2:] ^ 128, d, -128 * d)


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read the scales and biases [blocks, 8] of a K block: 6 bits each in 12 bytes, times two float16 numbers."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    mins = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _half(b[:, :2]) * scales, -(_half(b[:, 2:4]) * mins)


def _k_nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Split 128 bytes [blocks, 128], of which 32 hold two groups: [blocks, 8, 32]."""
    return _nibbles(bytes_.reshape(-1, 4, GROUP)).reshape(-1, SUPER, GROUP)


def _q4_k(b: np.ndarray) -> Groups:
    return Groups(_k_nibbles(b[:, 16:]), *_k_scales(b))


def _q5_k(b: np.ndarray) -> Groups:
    bits = b[:, None, 16:48] >> np.arange(SUPER, dtype=np.uint8)[:, None] & 1
    return Groups(_k_nibbles(b[:, 48:]) | bits << 4, *_k_scales(b))


def _nonlinear(bytes_: np.ndarray) -> np.ndarray:
    """Look up 4-bit codes, each as a number from 0 to 255."""
    return (NONLINEAR + 128).astype(np.uint8)[_nibbles(bytes_)]


def _iq4_nl(b: np.ndarray) -> Groups:
    d = _half(b[:, :2])
    return Groups(_nonlinear(b[:, 2:]), d, -128 * d)


def _iq4_xs(b: np.ndarray) -> Groups:
    groups = np.arange(SUPER, dtype=np.uint16)
    low = b[:, 4:8].repeat(2, axis=-1) >> (groups % 2 * 4).astype(np.uint8) & 15
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> (2 * groups) & 3
    scales = _half(b[:, :2]) * ((low | high << 4).astype(np.int16) - 32)
    return Groups(_nonlinear(b[:, 8:].reshape(-1, SUPER, 16)), scales, -128 * scales)


def _mxfp4(b: np.ndarray) -> Groups:
    return Groups(_nibbles(b[:, 1:]), b[:, :1], None)


class Exact(NamedTuple):
    """A type whose blocks are groups of MLX: bits of a code, bytes of a block, groups in it, and how to read it.

    rounds: whether scales need more than float16's bits.
    """

    bits: int
    nbytes: int
    groups: int
    read: Callable[[np.ndarray], Groups]
    rounds: bool = False
    mode: str = "affine"


EXACT = {
    "Q4_0": Exact(4, 18, 1, _q4_0),
    "Q4_1": Exact(4, 20, 1, _q4_1),
    "Q5_0": Exact(5, 22, 1, _q5_0),
    "Q5_1": Exact(5, 24, 1, _q5_1),
    "Q8_0": Exact(8, 34, 1, _q8_0),
    "Q4_K": Exact(4, 144, SUPER, _q4_k, rounds=True),
    "Q5_K": Exact(5, 176, SUPER, _q5_k, rounds=True),
    "IQ4_NL": Exact(8, 18, 1, _iq4_nl),
    "IQ4_XS": Exact(8, 136, SUPER, _iq4_xs, rounds=True),
    "MXFP4": Exact(4, 17, 1, _mxfp4, mode="mxfp4"),
}


def groups_of(kind: str, rows: np.ndarray) -> Groups:
    """Take rows of blocks, uint8 [rows, bytes], of a type in EXACT apart."""
    form, n = EXACT[kind], len(rows)
    codes, scales, biases = form.read(np.ascontiguousarray(rows).reshape(-1, form.nbytes))
    return Groups(codes.reshape(n, -1), scales.reshape(n, -1), None if biases is None else biases.reshape(n, -1))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes uint8 [rows, columns] as MLX does: uint32 [rows, columns * bits / 32], the first lowest."""
    rows = len(codes)
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits in (2, 4):
        step = 8 // bits
        packed = codes[:, ::step].copy()
        for i in range(1, step):
            packed |= codes[:, i::step] << (bits * i)
        return packed.view("<u4")
    pairs = codes[:, ::2] | codes[:, 1::2].astype(np.uint16) << bits
    fours = pairs[:, ::2] | pairs[:, 1::2].astype(np.uint32) << 2 * bits
    eights = fours[:, ::2] | fours[:, 1::2].astype(np.uint64) << np.uint64(4 * bits)
    words = np.ascontiguousarray(eights).view(np.uint8).reshape(rows, -1, 8)[..., :bits]
    return np.ascontiguousarray(words).reshape(rows, -1).view("<u4")
