"""The store of features encodes as rarely as its bytes allow."""

import mlx.core as mx
from fuzzing import profile
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.pictures.vision import Features

ROWS = mx.zeros((2, 8))  # 64 bytes


def encoded(store: Features, prompts) -> int:
    """Return the number of encodings for prompts of these pictures."""
    count = 0
    for key in "".join(prompts):
        if store.get(key) is None:
            store.put(key, ROWS)
            count += 1
    return count


def test_three_pictures_in_five_prompts_are_encoded_three_times():
    prompts = ["a", "ab", "abc", "ca", "b"]
    assert sum(map(len, prompts)) == 9
    assert encoded(Features(), prompts) == 3
    assert encoded(Features(2 * ROWS.nbytes), prompts) == 5  # "a" is dropped after "abc", "b" after "ca"
    assert encoded(Features(0), prompts) == 9


@profile(60)
@given(st.integers(0, 4), st.lists(st.text("abcde", max_size=5), max_size=12))
def test_the_least_recently_used_are_dropped(room, prompts):
    store, used = Features(room * ROWS.nbytes), []
    encoded(store, prompts)
    for key in "".join(prompts):
        used = [*(other for other in used if other != key), key]
    kept = used[len(used) - min(room, len(used)) :]
    assert [key for key in "abcde" if store.get(key) is not None] == sorted(kept)
    assert store.nbytes == len(kept) * ROWS.nbytes
