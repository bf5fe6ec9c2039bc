"""The budget of lines: only code counts, and a room above its number is named."""

from collections import Counter

import lines

TEXT = '''"""A docstring
of two lines."""

# a comment
X = """a text
of two lines"""


def f(a,  # a comment behind code
      b):
    """A docstring."""
    return a  # here too


class C:
    \'\'\'A docstring.\'\'\'

    y: int = 0
    """No docstring: a text after a field."""
'''


def test_blank_lines_comments_and_docstrings_do_not_count():
    assert lines.code_lines(TEXT) == 8
    assert lines.code_lines("") == 0


def test_rooms_are_directories(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x.py", "a/y.py", "a/b/z.py"):
        (tmp_path / name).write_text("x = 1\n")
    assert lines.by_room(tmp_path) == Counter(hall=1, a=2)


def test_a_room_above_its_budget_and_one_without_are_named():
    found = lines.excess(Counter(a=3, b=2, c=1), {"a": 2, "b": 2})
    assert [line.split(":")[0] for line in found] == ["a", "c"]
