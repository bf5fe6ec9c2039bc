"""Check what is left out of a kernel for the values of its template, and that these mean the same in all of it."""

import re

import pytest

from mlx_mtp.kernels._fold import folded, truth
from mlx_mtp.kernels._shorten import joined, tokens
from mlx_mtp.kernels._source import DIRECTORY, FORMAT

FILES = {path.name: path.read_text() for path in sorted(DIRECTORY.iterdir()) if path.suffix in (".h", ".metal")}
VALUES = {"BITS": 4, "FP": 0, "BIAS": 1}


@pytest.mark.parametrize(
    ("condition", "decided"),
    [
        ("BIAS", True),
        ("!BIAS", False),
        ("BITS == 4", True),
        ("BITS > 4", False),
        ("!FP && BITS != 3", True),
        ("FP && i < 3", False),
        ("BIAS && i < 3", None),
        ("BIAS || i < 3", True),
        ("FP || BITS < 4 || i < 3", None),
        ("FP && i < 3 || BIAS", True),
        ("(BIAS || i) && FP", None),
        ("BITS * 2 == 8", None),
        ("ROWS > 1", None),
    ],
)
def test_conditions(condition, decided):
    assert truth("".join(tokens(condition)), VALUES) is decided


@pytest.mark.parametrize(
    ("code", "left"),
    [
        ("if constexpr (FP) { a; b; } else { c; d; }", "{ c; d; }"),
        ("if constexpr (BIAS) { a; b; } else { c; d; }", "{ a; b; }"),
        ("x; if constexpr (FP) { a; } y;", "x; y;"),
        ("if (i) { x; } else if constexpr (FP) { a; } y;", "if (i) { x; } else {} y;"),
        ("if constexpr (FP) { a; } else if constexpr (BIAS) { b; } else { c; } y;", "b; y;"),
        ("if constexpr (BIAS) { a; } else if (i) { b; } else { c; } y;", "a; y;"),
        ("if constexpr (ROWS) { if constexpr (FP) { a; } b; }", "if constexpr (ROWS) { b; }"),
        ("x = BIAS ? f(a, b) : c;", "x = f(a, b);"),
        ("x = BITS == 3 || BITS == 5 ? 8 : i ? j : 4;", "x = i ? j : 4;"),
        ("x = BIAS ? i ? j : k : 4;", "x = i ? j : k;"),
        ("x = i ? 1 : FP ? 2 : 3;", "x = i ? 1 : 3;"),
        ("f(FP ? a : b, c); x = i && FP ? a : b;", "f(b, c); x = b;"),
        ("x = i || FP ? a : b;", "x = i || FP ? a : b;"),
    ],
)
def test_branches(code, left):
    assert joined(folded(tokens(code), VALUES)) == joined(tokens(left))
    assert folded(tokens(code), {}) == tokens(code)


def parameters(template):
    return [each.split()[-1] for each in template.split(",")]


def test_headers_pass_known_names_on():
    """A template's BITS, GROUP and bools are the kernel's own wherever one is named: `folded` takes them for that."""
    known, code = {*FORMAT}, re.sub(r"//.*", "", "".join(FILES.values()))
    templates = re.findall(r"template <([^<>]+)>\s+(?:struct|(?:[\w<>, ]+\s)?)\s*(\w+)\s*[({]", code)
    assert {"gathered_products", "Format", "load_values", "scale_of", "Keys"} <= {name for _, name in templates}
    known |= {each.split()[1] for template, _ in templates for each in template.split(",") if "bool" in each} - {
        "TAIL"
    }
    assert known == {"BITS", "GROUP", "FP", "SUM", "CHOSEN"}
    for template, name in templates:
        for given in re.findall(rf"\b{name}<([^<>;(]+)>", code):
            for parameter, argument in zip(parameters(template), given.split(","), strict=False):
                assert parameter not in known or argument.strip() == parameter, (name, given)
