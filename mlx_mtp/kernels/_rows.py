"""Share out the rows of a verify among threadgroups, and the values of a head in a simdgroup."""

BLOCK, MOST_BLOCKS = 128, 2  # values of a head that a simdgroup takes at once, and how often
MOST_ROWS = 5  # that a thread keeps sums of in registers, each with four rows of weights


def row_groups(m: int, most: int = MOST_ROWS) -> tuple[int, int]:
    """Count (groups, rows in each): the fewest groups of at most `most` rows that hold m >= 1 rows, evenly filled.

    The last group begins at m - rows, so it may share rows with the one before; only its own are its to store.
    """
    assert m >= 1, f"{m} rows"
    groups = -(-m // most)
    return groups, -(-m // groups)
