"""Leave out of a kernel's tokens what the values of its template decide against."""

import operator
import re
from collections.abc import Mapping

TEST = re.compile(r"(!?)(\w+)(?:(==|!=|<|>)(\d+))?")
COMPARE = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "": operator.ne}
STARTS = {"=", "(", ",", "{", ";", "?", ":", "return"}  # behind which a condition begins
ENDS = {";", ",", ")", "}", "]"}
Values = Mapping[str, int]


def folded(parts: list[str], values: Values) -> list[str]:
    """Take the branch of each `if constexpr` and `?` whose condition the values decide, and leave the other out.

    A name of `values` must mean that value wherever it stands, in the headers' templates as well.
    """
    parts = list(parts)
    for at in [i for i, part in enumerate(parts) if part in ("constexpr", "?")][::-1]:  # inner ones first
        if parts[at] == "?":
            _fold_choice(parts, at, values)
        elif parts[at - 1] == "if":
            _fold_branch(parts, at - 1, values)
    return parts


def truth(condition: str, values: Values) -> bool | None:
    """Decide tests of names by numbers that || and && join, as far as the values do: else None."""
    if "(" in condition:
        return None
    for word, decides in (("||", True), ("&&", False)):
        if word in condition:
            sides = [truth(side, values) for side in condition.split(word)]
            return decides if decides in sides else None if None in sides else not decides
    test = TEST.fullmatch(condition)
    if not test or test[2] not in values or (test[1] and test[3]):
        return None
    return COMPARE[test[3] or ""](values[test[2]], int(test[4] or 0)) != bool(test[1])


def _fold_branch(parts: list[str], start: int, values: Values) -> None:
    closing = _closing(parts, start + 2)
    chosen = truth("".join(parts[start + 3 : closing]), values)
    if chosen is None:
        return
    end = stop = _closing(parts, closing + 1) + 1
    if parts[end : end + 1] == ["else"]:
        stop = _statement(parts, end + 1)
    branch = parts[closing + 1 : end] if chosen else parts[end + 1 : stop] or ["{", "}"]
    if parts[start - 1] != "else" and branch[0] == "{" and branch.count("{") == 1 and branch.count(";") < 2:
        branch = branch[1:-1]
    parts[start:stop] = branch


def _statement(parts: list[str], start: int) -> int:
    """Find where a block ends, or an `if` with all that is its else."""
    if parts[start] == "{":
        return _closing(parts, start) + 1
    end = _closing(parts, _closing(parts, parts.index("(", start)) + 1) + 1
    return _statement(parts, end + 1) if parts[end : end + 1] == ["else"] else end


def _fold_choice(parts: list[str], at: int, values: Values) -> None:
    start = at
    while parts[start - 1] not in STARTS:
        start -= 1
    chosen = truth("".join(parts[start:at]), values)
    if chosen is None:
        return
    colon = _end(parts, at + 1, {":"})
    end = _end(parts, colon + 1, ENDS)
    parts[start:end] = parts[at + 1 : colon] if chosen else parts[colon + 1 : end]


def _closing(parts: list[str], opening: int) -> int:
    """Find the bracket that closes the one at `opening`."""
    return _end(parts, opening + 1, {")", "}", "]"})


def _end(parts: list[str], at: int, ends: set[str]) -> int:
    """Find the first of `ends` that stands in no bracket, and belongs to no inner choice."""
    depth = 0
    while depth or parts[at] not in ends:
        depth += (parts[at] in "([{?") - (parts[at] in ")]}:")
        at += 1
    return at
