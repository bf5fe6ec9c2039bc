"""Check that the text MLX gets means what our files say, compiles, and how much of it a cycle's launches carry."""

import functools
import re

import launches_text
import mlx.core as mx
import pytest
from exact import FORMATS, draw, same_bits
from launches import MODELS, with_kernels
from metal_cases import linux_only
from short_texts import checked, expanded, macros, same_but_for_names
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.bench.kernels_cases import SMALL
from mlx_mtp.kernels import _source, source_held, verify_qmm
from mlx_mtp.kernels._fold import folded
from mlx_mtp.kernels._rename import ABOUT
from mlx_mtp.kernels._shorten import Text, defined, definitions, joined, reached, shorten, tokens
from mlx_mtp.kernels._source import DIRECTORY

HEADERS = {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.h"))}
BODIES = {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.metal"))}
EVERYTHING = "".join(HEADERS.values())
VALUES = {"BITS": 4, "GROUP": 64, "FP": 0, "BIAS": 0, "SOFTMAX": 1, "CHOSEN": 1}


def without_comments(text):
    return re.sub(r"//.*", "", text)


def of_kernel(op):
    """Its headers, its body, and names as they are given: of inputs that it asks about, and of a template."""
    *headers, body = _source._included(DIRECTORY, f"{op}.metal", {}).values()
    asked = {about[1] for word in tokens(body) if (about := ABOUT.fullmatch(word))}
    return "".join(headers), body, sorted({*asked, "T", "ROWS", "LANES"})


@pytest.mark.parametrize("text", [*HEADERS.values(), *BODIES.values()], ids=[*HEADERS, *BODIES])
def test_joined_text_has_the_same_tokens(text):
    """Beside equal tokens: the same characters but white space, the same words, and lines of the preprocessor."""
    short, code = joined(tokens(text)), without_comments(text)
    assert tokens(short) == tokens(text)
    assert re.sub(r"\s", "", short) == re.sub(r"\s", "", code)
    for kind in (r"[\w.]+", r"^#.*$"):
        assert re.findall(kind, short, re.MULTILINE) == re.findall(kind, code, re.MULTILINE)


@pytest.mark.parametrize("op", BODIES)
def test_what_a_body_leads_to_is_there(op):
    """With all headers in front of it: no name of theirs is left whose definition is not."""
    every = definitions(tokens(EVERYTHING))
    kept = reached(every, BODIES[op])
    assert [each for each in every if each in kept] == kept
    used = set(re.findall(r"\w+", " ".join(part for each in kept for part in each) + BODIES[op]))
    assert {defined(each) for each in every} & used <= {defined(each) for each in kept}


@pytest.mark.parametrize(("op", "values"), [*((op, VALUES) for op in BODIES), ("moe_route", {}), ("verify_qmm", {})])
def test_short_text_is_the_whole_one_but_for_names(op, values):
    """With macros replaced: token for token, each word of ours another one, and those of C++ and Metal themselves."""
    header, body, given = of_kernel(op)
    short = shorten(header, body, given, values)
    head, source = folded(tokens(header), values), folded(tokens(body), values)
    whole = [part for each in reached(definitions(head), " ".join(source)) for part in each] + source
    names = same_but_for_names(expanded(whole), expanded(tokens(short.header + "\n" + short.body)))
    assert re.findall("#include .*", short.header) == [part for part in whole if part.startswith("#include")]
    assert {names.get(name, short.names[name]) for name in given} == set(short.names.values())
    assert (short.header.whole, short.body.whole) == (header, body)
    assert {name.whole: name for name in short.names.values()} == short.names


@pytest.mark.parametrize("op", BODIES)
def test_mlx_finds_what_it_looks_for(op):
    """It reads attributes, and what is asked about inputs, in the body alone, where a macro would hide them."""
    short = shorten(*of_kernel(op))
    sought = {name for name in emulator.signature.ATTRIBUTES if name in without_comments(short.body.whole)}
    assert {name for name in emulator.signature.ATTRIBUTES if name in short.body} == sought
    for what in ("_shape", "_strides"):
        assert (what in short.body) == (what in without_comments(short.body.whole))
    assert not macros(short.body)


def test_every_definition_has_its_name():
    names = {defined(each) for each in definitions(tokens(EVERYTHING))}
    assert {"UNROLL", "Format", "gathered_products", "COLUMNS", "Fragment", "Sight", "RowSum", "swiglu"} <= names
    assert all(re.search(rf"\b{name}\b", EVERYTHING) for name in names - {""})
    assert defined(tokens("#include <metal_simdgroup_matrix>")) == ""  # which is always kept


def test_texts_are_strings_for_mlx():
    short = shorten("// a comment\nint f() { return 1; }\n", "result[0] = f() + a_shape[0];", ["result", "a"])
    assert isinstance(short.header, Text)
    assert (short.header, short.body) == ("int f(){return 1;}", "b[0]=f()+a_shape[0];")
    assert short.names == {"result": "b", "a": "a"}


@functools.cache
def texts(name):
    """Of the longest recorded cycle, and what launches say that MLX holds of them."""
    model, before = with_kernels(name), source_held()
    return launches_text.texts(model, 4), source_held() - before


@linux_only
@pytest.mark.parametrize("model", sampled(["Step-3.5-Flash", "Qwen3.6-35B-A3B"], MODELS))
def test_what_mlx_makes_of_short_texts_compiles(model):
    """Of each kernel of a cycle: MLX's own text around ours, instantiated."""
    checked(dict.fromkeys(text for _, text in texts(model)[0]))


def same_with_short_texts(monkeypatch, computed):
    """The emulator compiles whole texts, which it finds behind short ones; here those themselves as well."""
    with emulator.emulated(emulator.Options(traffic=False)):
        whole = computed()
        mx.eval(whole)
        monkeypatch.setattr(emulator.kernel, "_whole", str)
        made = []
        monkeypatch.setattr(emulator.kernel, "build", lambda *of: made.append(of[1:3]) or emulator.compile.build(*of))
        _source._made.cache_clear()
        short = computed()
        mx.eval(short)
    _source._made.cache_clear()
    assert made
    assert "//" not in "".join(text for texts in made for text in texts)
    for ours, theirs in zip(short, whole, strict=True):
        assert same_bits(ours, theirs)


@linux_only
@pytest.mark.parametrize("op", sampled(list(SMALL)[1::6], SMALL))
def test_what_a_mac_compiles_computes_the_same(op, monkeypatch):
    site = SMALL[op]()
    x = mx.random.normal((max(site.candidates), site.width), mx.bfloat16)
    same_with_short_texts(monkeypatch, lambda: site.ours(x))


@linux_only
@pytest.mark.parametrize("of", sampled([("affine", 6, 64), ("nvfp4", 4, 16)], FORMATS), ids=str)
def test_each_format_computes_the_same(of, monkeypatch):
    """A short text lacks what other formats need."""
    x, weights = draw(*of, (8, 512), 2, mx.bfloat16)
    same_with_short_texts(monkeypatch, lambda: verify_qmm(x, weights))


BOUNDS = [("Step-3.5-Flash", 1.5e6, 12e6), ("GLM-4.5", 2.9e6, 25e6)]


@pytest.mark.parametrize(("name", "ours", "held"), sampled(BOUNDS[:1], BOUNDS))
def test_text_of_a_cycle_is_bounded(name, ours, held):
    """The source that its launches carry, and what MLX reserves for it."""
    found, counted = texts(name)
    launched = launches_text.launches(found)
    assert sum(each.ours for each in launched) <= ours
    assert sum(each.held for each in launched) <= held
    assert sum(each.ours + _source.RESERVED for each in launched) == counted
