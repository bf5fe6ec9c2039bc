"""Check that the text MLX gets has the tokens of our files, and how much of it the launches of a cycle carry."""

import re

import launches_text
import mlx.core as mx
import pytest
from exact import same_bits
from launches import with_kernels
from metal_cases import linux_only
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.bench.kernels_cases import SMALL
from mlx_mtp.kernels import _source
from mlx_mtp.kernels._shorten import Text, defined, definitions, joined, shorten, tokens
from mlx_mtp.kernels._source import DIRECTORY

HEADERS = {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.h"))}
BODIES = {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.metal"))}
EVERYTHING = "".join(HEADERS.values())


def without_comments(text):
    return re.sub(r"//.*", "", text)


@pytest.mark.parametrize("text", [*HEADERS.values(), *BODIES.values()], ids=[*HEADERS, *BODIES])
def test_short_text_has_the_same_tokens(text):
    """Beside equal tokens: the same characters but white space, the same words, and lines of the preprocessor."""
    short, code = joined(tokens(text)), without_comments(text)
    assert tokens(short) == tokens(text)
    assert re.sub(r"\s", "", short) == re.sub(r"\s", "", code)
    for kind in (r"[\w.]+", r"^#.*$"):
        assert re.findall(kind, short, re.MULTILINE) == re.findall(kind, code, re.MULTILINE)


@pytest.mark.parametrize("op", BODIES)
def test_what_a_body_leads_to_is_there(op):
    """With all headers in front of it: no name of theirs is left in the short text whose definition is not."""
    header, body = shorten(EVERYTHING, BODIES[op])
    every = definitions(tokens(EVERYTHING))
    kept = definitions(tokens(header))
    assert [each for each in every if each in kept] == kept
    used = set(re.findall(r"\w+", header + body))
    assert {defined(each) for each in every} & used <= {defined(each) for each in kept}
    assert (header.whole, body.whole) == (EVERYTHING, BODIES[op])


def test_every_definition_has_its_name():
    names = {defined(each) for each in definitions(tokens(EVERYTHING))}
    assert {"UNROLL", "Format", "gathered_products", "COLUMNS", "Fragment", "Sight", "RowSum", "swiglu"} <= names
    assert all(re.search(rf"\b{name}\b", EVERYTHING) for name in names - {""})
    assert defined(tokens("#include <metal_simdgroup_matrix>")) == ""  # which is always kept


def test_texts_are_strings_for_mlx():
    header, _ = shorten("// a comment\nint f() { return 1; }\n", "y[0] = f();")
    assert isinstance(header, Text)
    assert header == "int f(){return 1;}"


@linux_only
@pytest.mark.parametrize("op", sampled(list(SMALL)[1::6], SMALL))
def test_what_a_mac_compiles_computes_the_same(op, monkeypatch):
    """The emulator compiles whole texts; here the short ones as well, in whose place it does not know whole ones."""
    site = SMALL[op]()
    x = mx.random.normal((max(site.candidates), site.width), mx.bfloat16)
    with emulator.emulated(emulator.Options(traffic=False)):
        whole = site.ours(x)
        mx.eval(whole)
        texts = []
        monkeypatch.setattr(_source, "shorten", lambda *text: texts.extend(map(str, shorten(*text))) or texts[-2:])
        _source._made.cache_clear()
        short = site.ours(x)
        mx.eval(short)
    _source._made.cache_clear()
    assert texts
    assert "//" not in "".join(texts)
    for ours, theirs in zip(short, whole, strict=True):
        assert same_bits(ours, theirs)


BOUNDS = [("Step-3.5-Flash", 3.1e6, 64e6 / 4), ("GLM-4.5", 6e6, 64e6 / 2)]


@pytest.mark.parametrize(("name", "ours", "held"), sampled(BOUNDS[:1], BOUNDS))
def test_text_of_a_cycle_is_bounded(name, ours, held):
    """Of the longest recorded cycle: the source its launches carry, and what MLX reserves for it."""
    launched = launches_text.launches(with_kernels(name), 4)
    assert sum(each.ours for each in launched) <= ours
    assert sum(each.held for each in launched) <= held
