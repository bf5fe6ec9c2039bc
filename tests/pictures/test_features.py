"""The store of features encodes as rarely as its bytes allow, and never drops what a prompt needs."""

import mlx.core as mx
from fuzzing import profile
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.pictures.vision import Features

ROWS = mx.zeros((2, 8))  # 64 bytes


def encoded(store: Features, prompts) -> int:
    """Return the number of encodings for prompts of these pictures, each pinned while its prompt is read."""
    count = 0
    for prompt in prompts:
        with store.pinned(prompt):
            for key in prompt:
                if store.get(key) is None:
                    store.put(key, ROWS)
                    count += 1
            assert all(store.get(key) is not None for key in prompt)
    return count


def test_three_pictures_in_five_prompts_are_encoded_three_times():
    prompts = ["a", "ab", "abc", "ca", "b"]
    assert sum(map(len, prompts)) == 9
    assert encoded(Features(), prompts) == 3
    assert encoded(Features(2 * ROWS.nbytes), prompts) == 5  # "a" is dropped after "abc", "b" after "ca"
    assert encoded(Features(0), prompts) == 9


@profile(60)
@given(st.integers(0, 4), st.lists(st.text("abcde", max_size=5), max_size=12))
def test_the_least_recently_used_are_dropped_and_pinned_ones_never(room, prompts):
    store, used = Features(room * ROWS.nbytes), []
    encoded(store, prompts)
    for key in "".join(prompts):
        used = [*(other for other in used if other != key), key]
    kept = used[len(used) - min(room, len(used)) :]
    assert [key for key in "abcde" if store.get(key) is not None] == sorted(kept)
    assert store.nbytes == len(kept) * ROWS.nbytes


def test_overlapping_pins():
    store = Features(0)
    with store.pinned(["a"]):
        with store.pinned(["a", "b"]):
            store.put("a", ROWS)
            store.put("b", ROWS)
        assert store.get("a") is not None
        assert store.get("b") is None
    assert store.nbytes == 0
