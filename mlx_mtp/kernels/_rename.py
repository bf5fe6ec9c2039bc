"""Give a kernel's own words short names: all but those of C++ and Metal."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from string import ascii_letters, ascii_lowercase, ascii_uppercase

# C++'s words and Metal's, as far as kernels have them: what is not in here is ours. Where one is missing, a kernel
# does not compile, here as on a Mac.
WORDS = """
    auto bool break const constexpr continue decltype else false float for if inline int operator reinterpret_cast
    return sizeof static static_cast struct template true typedef typename using void while
    constant device metal thread threadgroup half uint ushort int64_t size_t uint8_t uint32_t vec
    float2 float4 int2 int3 uint2 uint3 simdgroup_matrix conditional_t numeric_limits quiet_NaN
    INFINITY METAL_FUNC NAN as_type mem_flags mem_threadgroup threadgroup_barrier
    abs clamp cos exp exp2 fast fma isfinite isinf isnan log log1p max min precise rsqrt sin
    make_filled_simdgroup_matrix quad_max quad_sum simd_any simd_max simd_min simd_shuffle simd_shuffle_down
    simd_shuffle_xor simd_sum simdgroup_multiply_accumulate thread_elements
    simdgroup_index_in_threadgroup thread_index_in_simdgroup thread_index_in_threadgroup thread_position_in_grid
    thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid threads_per_grid
    threads_per_threadgroup
"""
OUTSIDE = frozenset(WORDS.split())
ABOUT = re.compile(r"(\w+)(_(?:shape|strides|ndim))")  # what MLX finds in a body, behind an input's name
WORD = re.compile(r"[A-Za-z_]\w*")


def renaming(parts: Iterable[str], given: Iterable[str]) -> tuple[dict[str, str], Iterator[str]]:
    """Choose short names for words of ours, those `given` to MLX first, then the most frequent: and what is left."""
    given = list(given)
    words = Counter(part for part in parts if WORD.fullmatch(part))
    ours = [
        word
        for word, _ in words.most_common()
        if word not in OUTSIDE and not ((about := ABOUT.fullmatch(word)) and about[1] in given)
    ]
    names = _short_names({*words, *given})
    return {word: next(names) for word in dict.fromkeys([*given, *ours]) if len(word) > 1}, names


def renamed(part: str, short: dict[str, str]) -> str:
    """Give a token its short name, or that of the input that it is about."""
    about = ABOUT.fullmatch(part)
    return short.get(part) or (short[about[1]] + about[2] if about and about[1] in short else part)


def _short_names(taken: set[str]) -> Iterator[str]:
    """Make names that no word of C++ or Metal is like, those of one letter first: I is a macro of <complex.h>."""
    pairs = (a + b for a in ascii_lowercase for b in ascii_uppercase)
    return (name for name in itertools.chain(ascii_letters.replace("I", ""), pairs) if name not in taken)
