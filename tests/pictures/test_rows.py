"""Pictures as tokens: words, places and positions against a row-by-row count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.pictures.rows import Picture, edge_after, mark_ids, places_in, positions_of, shift_at

SIDES = st.integers(1, 5)
PARTS = st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 3), SIDES, SIDES)), max_size=8)


def picture(number: int, height: int, width: int) -> Picture:
    return Picture(bytes([number]), (1, height, width))


def built(parts):
    """Return tokens of texts (an int) and pictures (number, height, width), and each row's position, by counting."""
    tokens, rows, place = [], [], 0
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            rows.append((place,) * 3)
            place += 1
            continue
        _, height, width = part
        tokens += picture(*part).tokens
        rows += [(place, place + y, place + x) for y in range(height) for x in range(width)]
        place += max(height, width)
    return tokens, rows, place


@settings(max_examples=60, deadline=None)
@given(PARTS, st.data())
def test_places_and_positions_follow_from_any_prefix_of_the_tokens(parts, data):
    tokens, rows, place = built(parts)
    end = data.draw(st.integers(0, len(tokens)))
    begin = data.draw(st.integers(0, end))
    places = places_in(tokens[:end])
    assert positions_of(places, begin, end).T.tolist() == [list(row) for row in rows[begin:end]]
    whole, edges, row = places_in(tokens), set(), 0
    assert shift_at(whole, len(tokens)) == place - len(tokens)
    for part in parts:
        size = 1 if isinstance(part, int) else part[1] * part[2]
        edges |= set() if size == 1 and isinstance(part, int) else {row, row + size}
        row += size
    assert edge_after(whole, begin) == min((edge for edge in edges if edge > begin), default=None)
    assert mark_ids(tokens, 77) == [77 if token < 0 else token for token in tokens]


def test_tokens_differ_if_digest_or_grid_differ():
    alike = [picture(n, h, w).tokens for n in range(3) for h, w in ((2, 6), (6, 2), (3, 4), (1, 12))]
    assert len({tuple(tokens) for tokens in alike}) == len(alike)
    assert all(len(tokens) == 12 and min(tokens) >= -(2**63) and max(tokens) < 0 for tokens in alike)
    assert len(set(alike[0])) == 4
    assert not set(alike[0]) & set(alike[1])


@pytest.mark.parametrize(
    "damaged",
    [
        lambda rows: [*rows[:5], 1, *rows[5:]],
        lambda rows: rows[:5] + rows[6:],
        lambda rows: [*rows[:-1], 0],
        lambda rows: rows[1:],
        lambda rows: [rows[0], *rows[4:8], *rows[5:]],
        lambda rows: [*rows, rows[1]],
        lambda rows: [-1 - (5 << 50), 3],
        lambda rows: [-(2**63) - 1, 4],
    ],
)
def test_rows_that_are_no_picture_are_refused(damaged):
    with pytest.raises(ValueError, match=r"tokens: the picture at token \d+ is "):
        places_in([4, *damaged(picture(1, 3, 4).tokens), 4])
