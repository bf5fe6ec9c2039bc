"""Say an exception in one line."""


def first_line(e: BaseException) -> str:
    """Return the first line of an exception's text, or its type's name where it has none."""
    return str(e).strip().partition("\n")[0] or type(e).__name__


def with_type(e: BaseException) -> str:
    """Return an exception's type and the first line of its text, if any: "KeyError: 'name'"."""
    line, kind = first_line(e), type(e).__name__
    return kind if line == kind else f"{kind}: {line}"
