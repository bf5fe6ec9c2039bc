"""Imports point one way, and the checklist's hard limits hold."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlx_mtp"

# From the cellar up. A room, or a file of the hall, imports from rows above its own and from itself, nothing else.
FLOORS = [
    {"_version", "demo", "emulator", "kernels", "machine"},
    {"pictures"},
    {"cache", "grammar", "ranks"},
    {"layers"},
    {"models", "tuning"},
    {"decoding"},
    {"batch"},
    {"checkpoint", "generate"},
    {"session", "training"},
    {"bench", "lossless", "serve"},
    {"__init__", "cli"},
    {"__main__"},
]
FILES = sorted(PACKAGE.rglob("*.py"))
KNOWN = set(FILES)
HALL = 6  # files that no room holds, at most


def room_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@functools.cache
def parsed(file: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree, the module first."""
    return list(ast.walk(ast.parse(file.read_text())))


def imported_names(file: Path) -> set[str]:
    """Dotted names in mlx_mtp that a file imports, at any depth of its code."""
    found = set()
    package = ["mlx_mtp", *file.relative_to(PACKAGE).parts[:-1]]
    for node in parsed(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return {name.removeprefix("mlx_mtp.") for name in found if name.startswith("mlx_mtp")}


def file_of(name: str) -> Path | None:
    """The file that a dotted name is, or is defined in."""
    path = PACKAGE.joinpath(*name.split("."))
    files = (
        path.with_suffix(".py"),
        path / "__init__.py",
        path.parent.with_suffix(".py"),
        path.parent / "__init__.py",
    )
    return next((file for file in files if file in KNOWN), None)


@functools.cache
def imported_files(file: Path) -> set[Path]:
    return {found for name in imported_names(file) if (found := file_of(name)) and found != file}


def imported_rooms(file: Path) -> set[str]:
    return {room_of(found) for found in imported_files(file)}


def test_imports_point_one_way():
    for file in FILES:
        room = room_of(file)
        (floor,) = [i for i, rooms in enumerate(FLOORS) if room in rooms]
        assert imported_rooms(file) - {room} <= set().union(*FLOORS[:floor]), file


def test_files_form_no_circle():
    needs = {file: imported_files(file) for file in FILES}
    while free := [file for file in needs if not needs[file] & needs.keys()]:
        for file in free:
            del needs[file]
    assert not needs


def test_every_room_is_listed_and_the_hall_is_small():
    assert {room_of(file) for file in FILES} == set().union(*FLOORS)
    assert len(list(PACKAGE.glob("*.py"))) <= HALL


def test_hard_limits():
    for file in FILES:
        text = file.read_text()
        assert text.count("\n") <= (600 if room_of(file) == "models" else 400), file
        for node in parsed(file):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (file, node.name)
            if isinstance(node, ast.Call) and room_of(file) != "cli":
                assert not (isinstance(node.func, ast.Name) and node.func.id == "print"), (file, node.lineno)


def test_every_module_says_first_what_it_does():
    nouns = {"A", "An", "The", "What", "How", "Where", "Whether", "Which", "Who", "When"}
    for file in FILES:
        first = (ast.get_docstring(parsed(file)[0]) or "").partition(" ")[0].rstrip(",:")
        assert first.replace("-", "").isalpha(), (file, first)
        assert first[0].isupper(), (file, first)
        assert first not in nouns, (file, first)


def test_nothing_outside_models_knows_a_family():
    families = [p.stem for p in (PACKAGE / "models").glob("*.py") if p.stem != "__init__"]
    for file in FILES:
        if room_of(file) in ("models", "demo") or file.name == "kernels_cases.py":  # shapes of released models
            continue
        text = re.sub("[Oo]llama", "", file.read_text())  # an API, which contains a family's name
        assert not [f for f in families if f in text], file


def test_caches_handle_token_ids_only():
    for file in FILES:
        assert room_of(file) != "cache" or "tokenizer." not in file.read_text(), file


def test_a_name_of_the_engine_is_defined_once():
    """`decoding/` drives sequences and `batch/` admits them: what both need is written once."""
    rooms = ("decoding", "batch")
    tops = [node for file in FILES if room_of(file) in rooms for node in parsed(file)[0].body]
    names = [node.name for node in tops if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert [name for name, number in Counter(names).items() if number > 1 and not name.startswith("_")] == []


def test_a_class_is_defined_once():
    """One word, one thing, in all rooms; families name their parts alike, and implement the protocols of pictures."""
    tops = [(file, node) for file in FILES if room_of(file) != "models" for node in parsed(file)[0].body]
    names = Counter(node.name for _, node in tops if isinstance(node, ast.ClassDef))
    aliases = {
        target.id
        for _, node in tops
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.isupper()
    }
    of_models = {
        p.name for f in FILES if room_of(f) == "models" for p in parsed(f)[0].body if isinstance(p, ast.ClassDef)
    }
    assert [name for name, number in names.items() if number > 1] == []
    assert names.keys() & aliases == set()
    assert names.keys() & of_models - {"Attention", "Pixels", "Tower"} == set()


def test_what_explains_a_token_is_short():
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("**One token, from prompt to screen**")[2]
    files = re.findall(r"^\d+\. `(\S+)`:", page.partition("## Where to look")[0], re.MULTILINE)
    assert len(files) <= 16
    assert sum((ROOT / file).read_text().count("\n") for file in files) <= 2400
