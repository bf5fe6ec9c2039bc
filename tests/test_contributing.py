"""Hold the lists "Add a ..." of CONTRIBUTING.md to the code: names in them exist, and each part is in its places."""

import ast
import functools
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlx_mtp
from mlx_mtp import kernels
from mlx_mtp.bench import kernels_cases
from mlx_mtp.bench.roofline import cost
from mlx_mtp.cache import kinds, slots
from mlx_mtp.cli.generate import generate
from mlx_mtp.cli.options import sampling_flags
from mlx_mtp.decoding import drafters
from mlx_mtp.decoding.options import EXPLANATION
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.kernels import contraction
from mlx_mtp.layers.kernel_site import Site
from mlx_mtp.models import DRAFTERS
from mlx_mtp.serve import sampling_fields
from mlx_mtp.serve.field_table import FIELDS
from mlx_mtp.tuning.kernel_fallback import WITHOUT_TRIAL

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TITLES = ("sampling option", "drafter", "kind of cache", "kernel")
PROBE = "matrix_order"  # no row of a model passes through it; `matrix_sums` launches it
OPS = sorted(path.stem for path in ROOT.glob("kernels/*.metal"))
OTHERS = {"MLX_MTP_SWEEP", "MLX_MTP_CACHE", "MLX_MTP_EMULATOR_CACHE", "True", "False", "None"}  # users set the first


def section(title: str) -> str:
    """Return the text under "## Add a <title>", up to the next heading."""
    found = re.search(rf"^## Add a {title}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@functools.cache
def sources() -> list[str]:
    """Return the repository's programs and the page's own."""
    files = [file for folder in ("mlx_mtp", "tests", "docs", "bench") for file in (ROOT / folder).rglob("*.py")]
    return [*(file.read_text() for file in files), *re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)]


@functools.cache
def names_of(code: str) -> set[str]:
    """Return every name in a program."""
    kinds = ("name", "arg", "id", "attr")
    return {getattr(node, kind) for node in ast.walk(ast.parse(code)) for kind in kinds if hasattr(node, kind)}


@functools.cache
def others() -> set[str]:
    """Return the names of all files and folders of programs, every macro of the kernels, and words of users."""
    files = [file for folder in ("mlx_mtp", "tests", "docs", "bench") for file in (ROOT / folder).rglob("*.py")]
    names = {part for file in files for part in (*file.parent.relative_to(ROOT).parts, file.stem)}
    return OTHERS | names.union(
        *(re.findall(r"#define (\w+)", file.read_text()) for file in ROOT.glob("kernels/*.h"))
    )


def is_defined(word: str) -> bool:
    return word in others() or any(word in names_of(code) for code in sources() if word in code)


@pytest.mark.parametrize("title", TITLES)
def test_files_and_names_in_a_list_exist(title):
    text = re.sub(r"```.*?```", "", section(title), flags=re.DOTALL)
    for shown in re.findall(r"`([^`]+)`", text):
        if "<" in shown or (" " in shown and "(" not in shown) or shown.startswith((".", "-", '"')):
            continue  # a pattern, a command, a suffix, a flag or a value
        if re.fullmatch(r"[\w./-]+(?:/|\.(?:py|md|metal|h))", shown):
            assert [*ROOT.glob(shown), *ROOT.glob(f"mlx_mtp/**/{shown}"), *ROOT.glob(f"tests/**/{shown}")], shown
        else:
            words = set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", shown)))
            assert not [word for word in words if not is_defined(word)], shown


@pytest.mark.parametrize("field", fields(Sampling), ids=lambda field: field.name)
def test_a_sampling_option_is_in_its_five_places(field):
    name = field.name
    assert re.search(rf"\b{name}\b", EXPLANATION)
    assert field.default is not MISSING
    parameters = inspect.signature(mlx_mtp.generate_step).parameters
    assert parameters[name].default == field.default
    flags = {option.name: option for option in generate.params}
    if name == "xtc_special_tokens":  # the commands read it from the tokenizer
        return
    assert name in sampling_flags(flags)
    assert flags[name].default == field.default
    asked = "temperature" if name == "temp" else name
    assert FIELDS[asked].letters == "hhhh"
    given = 0.25 if isinstance(field.default, float) else 3
    defaults = SimpleNamespace(defaults={}, seeds=lambda: 0)
    assert sampling_fields._sampling({asked: given}, defaults)[name] == given


def test_a_kind_of_drafter_is_in_its_places():
    text, folder = section("drafter"), Path(drafters.__file__).parent
    for path in folder.glob("*.py"):
        assert path.name == "__init__.py" or path.name in text, path.name
    assert all(drafters.Drafter in kind.__self__.__mro__ for kind in drafters.KINDS)
    assert all(f"`{name}.py`" in text and (ROOT / f"mlx_mtp/models/{name}.py").exists() for name in DRAFTERS)


def test_places_that_name_a_kind_of_drafter_are_listed():
    text, package = section("drafter"), ROOT / "mlx_mtp"
    kinds = {"Block", "BlockNetwork", "Heads", "HeadsAndBlock", "SmallModel"}
    for path in package.rglob("*.py"):
        room, name = path.relative_to(package).parts[0], f"{path.parent.name}/{path.name}"
        names = names_of(path.read_text()) if room in ("checkpoint", "lossless", "bench", "serve", "cli") else set()
        assert not names & kinds or name in text, name


def test_no_name_of_a_drafter_is_compared():
    for path in (ROOT / "mlx_mtp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            assert not (
                any(isinstance(side, ast.Attribute) and side.attr == "source" for side in sides)
                and any(isinstance(side, ast.Constant) and side.value for side in sides)
            ), f"{path}:{node.lineno}"


def test_a_name_in_a_file_is_defined_there():
    pairs = re.findall(r"`([A-Za-z_.]+)`(?: and `\w+`)?,? in\s+`([\w/]+\.py)`", PAGE)
    assert len(pairs) > 20
    for name, path in pairs:
        files = [file for file in (ROOT / "mlx_mtp").rglob("*.py") if f"/{path}" in str(file)] or [ROOT / path]
        nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
        defined = {getattr(node, "name", getattr(node, "id", "")) for node in nodes}
        assert name.split(".")[-1] in defined | {node.attr for node in nodes if isinstance(node, ast.Attribute)}, name


def test_a_kind_of_cache_is_in_its_places():
    text = section("kind of cache")
    assert all(f"`{pool.__name__}`" in text for pool in slots.POOLS.values())
    assert {kind.name for kind in kinds.BY_NAME.values()} == kinds.BY_NAME.keys()
    for kind in kinds.BY_NAME.values():
        assert kind in slots.POOLS or kind.is_mlx_lm, "neither pooled nor single"


@functools.cache
def modules_of(op: str) -> list[str]:
    """Return the names of the modules of mlx_mtp/kernels/ that launch an op, by themselves or by a helper module."""
    texts = {path.stem: path.read_text() for path in (ROOT / "mlx_mtp/kernels").glob("*.py")}
    found = [name for name, text in texts.items() if f'"{op}"' in text and name != "contraction"]
    users = [
        name for name, text in texts.items() if any(re.search(rf"^from \.{f} import", text, re.M) for f in found)
    ]
    return [name for name in (*found, *users) if not name.startswith("_")]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_in_its_places(op):
    assert modules_of(op), "no module launches it"
    modules = [op, *modules_of(op), *["matrix_sums"] * (op == PROBE)]
    assert any(getattr(kernels, name, None) for name in modules), "not exported"
    layers = "".join(path.read_text() for path in (ROOT / "mlx_mtp/layers").glob("*.py"))
    assert op in (*WITHOUT_TRIAL, PROBE) or any(re.search(rf"\b{name}\b", layers) for name in modules), "no site"
    launches = (ROOT / "mlx_mtp/bench/kernel_launches.py").read_text()
    assert any(re.search(rf"\bkernels\.{name}\b|\b{name}\(", launches) for name in modules), "no launches"
    body = (ROOT / f"kernels/{op}.metal").read_text()
    promises = "MULTIPLY_ADD(" in body or "PRODUCT(" in body
    assert not promises or op in {name for names in contraction.KERNELS.values() for name in names}
    tests = "".join(path.read_text() for path in (ROOT / "tests/kernels").glob("test_*.py"))
    assert any(re.search(rf"\b{name}\b", tests) for name in modules), "no test"
    calls = (ROOT / "tests/support/kernel_calls.py").read_text().partition("CALLS = {")[2].partition("\n}")[0]
    assert re.search(rf'"[\w ]*\b{op}\b[\w ]*":', calls), "no call in float32"
    assert re.search(rf"^\|[^|]*`{op}`", (ROOT / "kernels/README.md").read_text(), re.MULTILINE), "no row"


def test_each_site_has_a_case_and_a_cost():
    cases = {op for op, _ in kernels_cases.CASES.values()}
    ours = (site for site in Site.__subclasses__() if site.__module__.startswith("mlx_mtp."))  # not those of tests
    sites = {site.op for site in ours if isinstance(getattr(site, "op", None), str)}
    assert sites <= cases
    assert {op for op in cases if not op.startswith("matrix_")} == {op for ops in cost.KERNELS.values() for op in ops}
