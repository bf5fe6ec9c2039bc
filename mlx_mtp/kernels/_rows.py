"""How the rows of a verify are dealt to the groups of threads that hold them in registers."""

MOST_ROWS = 5  # in registers at once; more would spill


def row_groups(m: int) -> tuple[int, int]:
    """(groups, rows of each) for m rows: the fewest groups of at most 5, evenly filled."""
    groups = -(-m // MOST_ROWS)
    return groups, -(-m // groups)
