"""Quantize, dequantize and multiply GGUF's block formats IQ4_NL, IQ4_XS and Q6_K, in plain MLX operations.

Codes are packed as MLX packs 4 and 6 bits. Scales are uint16 words. IQ4_NL has one word per group of 32 weights, the
bits of a float16 number. The others have a record per 256 weights: a word with a float16 number, then a signed byte
for each group, its factor, two in a word. A weight is number * factor * value, computed in float32: the factor of
IQ4_NL is 1, the value is TABLE[code] or, of Q6_K, code - 32.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

# Values of IQ4's codes.
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MIDDLE = 32  # of Q6_K's codes
PIECE = 1 << 22  # weights that are dequantized at a time


class BlockFormat(NamedTuple):
    """Bits of a code, weights in a group, weights under one float16 number (`span`), and words of scales per span."""

    bits: int
    group_size: int
    span: int
    words: int


BLOCK_FORMATS = {
    "iq4_nl": BlockFormat(4, 32, 32, 1),
    "iq4_xs": BlockFormat(4, 32, 256, 5),
    "q6_k": BlockFormat(6, 16, 256, 9),
}


def block_mode(columns: int, words: int) -> str | None:
    """Return the name of the format whose rows of `columns` weights have `words` words of scales, else None."""
    fits = (mode for mode, form in BLOCK_FORMATS.items() if words * form.span == columns * form.words)
    return next(fits, None)


def _values(w: mx.array, bits: int) -> mx.array:
    """Return the values of packed codes [..., K * bits / 32] before scaling, float32 [..., K]."""
    lead, codes = w.shape[:-1], w.view(mx.uint8)
    if bits == 4:
        codes = mx.stack([codes & 15, codes >> 4], axis=-1).reshape(*lead, -1)
        return mx.array(TABLE, mx.float32)[codes]
    a, b, c = mx.split(codes.reshape(*lead, -1, 3), 3, axis=-1)
    four = [a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2]
    return mx.concatenate(four, axis=-1).reshape(*lead, -1).astype(mx.float32) - MIDDLE


def block_scales(scales: mx.array, mode: str) -> mx.array:
    """Return number * factor of each group, exact in float32 [..., K / group_size]. scales: uint16 [..., words]."""
    lead, words = scales.shape[:-1], BLOCK_FORMATS[mode].words
    records = scales.reshape(*lead, -1, words)
    numbers = mx.contiguous(records[..., :1]).view(mx.float16).astype(mx.float32)
    if words > 1:
        numbers = numbers * mx.contiguous(records[..., 1:]).view(mx.int8).astype(mx.float32)
    return numbers.reshape(*lead, -1)


def dequantized_blocks(w: mx.array, scales: mx.array, mode: str) -> mx.array:
    """Return the weights in float32 [..., K], with the bits of the `gguf` package's dequantization."""
    values, groups = _values(w, BLOCK_FORMATS[mode].bits), block_scales(scales, mode)
    return (groups[..., None] * values.reshape(*groups.shape, -1)).reshape(values.shape)


def quantized_blocks(weights: mx.array, mode: str) -> tuple[mx.array, mx.array]:
    """Return weights [..., K] in a block format: packed codes, and the words of scales.

    A group's scale maps its weight of the largest magnitude to code 0, the value -127 or -32, before the scale is
    rounded; each code is then the nearest. ValueError for rows that are not whole blocks of `span` weights.
    """
    form, lead = BLOCK_FORMATS[mode], weights.shape[:-1]
    if weights.shape[-1] % form.span:
        raise ValueError(f"{mode} needs rows of whole blocks of {form.span} weights, not of {weights.shape[-1]}")
    groups = weights.astype(mx.float32).reshape(*lead, -1, form.group_size)
    largest = mx.take_along_axis(groups, mx.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
    words = _scale_words(largest.squeeze(-1) / (TABLE[0] if form.bits == 4 else -MIDDLE), form)
    scales = block_scales(words, mode)[..., None]
    ratios = mx.where(scales == 0, 0, groups / mx.where(scales == 0, 1, scales))
    if form.bits == 4:
        middles = mx.array([(a + b) / 2 for a, b in pairwise(TABLE)])
        codes = sum((ratios > middle).astype(mx.uint32) for middle in middles)
    else:
        codes = (mx.clip(mx.round(ratios), -MIDDLE, MIDDLE - 1) + MIDDLE).astype(mx.uint32)
    return _packed(codes.reshape(*lead, -1), form.bits), words  # type: ignore[union-attr]


def _scale_words(scales: mx.array, form: BlockFormat) -> mx.array:
    """Return the uint16 words [..., words] for scales of groups, float32 [..., K / group_size], which are rounded."""
    if form.words == 1:
        return scales.astype(mx.float16).view(mx.uint16)
    most = MIDDLE if form.bits == 4 else 128  # factors are from -most on
    lead, records = scales.shape[:-1], scales.reshape(*scales.shape[:-1], -1, form.span // form.group_size)
    numbers = mx.take_along_axis(records, mx.abs(records).argmax(axis=-1, keepdims=True), axis=-1) / -most
    numbers = numbers.astype(mx.float16)
    divisor = mx.where(numbers == 0, 1, numbers.astype(mx.float32))
    factors = mx.clip(mx.round(records / divisor), -most, most - 1).astype(mx.int8)
    return mx.concatenate([numbers.view(mx.uint16), factors.view(mx.uint16)], axis=-1).reshape(*lead, -1)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """Return codes uint32 [..., K] packed as in MLX: [..., K * bits / 32], the first lowest."""
    several = codes.reshape(*codes.shape[:-1], -1, 8 if bits == 4 else 4)
    joined = (several << bits * mx.arange(several.shape[-1]).astype(mx.uint32)).sum(axis=-1).astype(mx.uint32)
    if bits == 4:
        return joined
    three = joined[..., None].view(mx.uint8)[..., :3]
    return mx.contiguous(three.reshape(*codes.shape[:-1], -1)).view(mx.uint32)


def block_product(x: mx.array, w: mx.array, scales: mx.array, mode: str, *, transpose: bool = True) -> mx.array:
    """Return x [..., M, K] times block weights [..., N, K], transposed: [..., M, N] in x's type, summed in float32.

    Without `transpose` it is x [..., M, N] times the weights: [..., M, K]. At most PIECE weights, but at least one
    row of each matrix, are dequantized at a time.
    """
    rows = w.shape[-2]
    count = math.prod(w.shape[:-2])
    size = max(PIECE // (count * w.shape[-1] * 32 // BLOCK_FORMATS[mode].bits), 1)
    wide, found = x.astype(mx.float32), []
    for begin in range(0, rows, size):
        part = w[..., begin : begin + size, :]
        if found:  # a piece is dequantized after the one before was used
            part = mx.depends(part, found[-1])
        piece = dequantized_blocks(part, scales[..., begin : begin + size, :], mode)
        if transpose:
            found.append(wide @ piece.swapaxes(-1, -2))
        else:
            product = wide[..., begin : begin + size] @ piece
            found = [found[0] + product] if found else [product]
    whole = found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)
    return whole.astype(x.dtype)
