"""Read the docstrings and source files of the running Python's standard library."""

import ast
import importlib
import inspect
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Memorised docstrings: (prefix, names).
FAMOUS = {
    "os.path.": "join exists basename dirname split splitext isfile isdir abspath getsize normpath expanduser",
    "os.": "listdir getcwd mkdir makedirs remove rename walk getenv chdir rmdir",
    "shutil.": "copy copyfile copytree rmtree move which",
    "json.": "dump dumps load loads",
    "re.": "match search sub compile findall split fullmatch",
    "itertools.": "chain count cycle repeat product permutations combinations accumulate",
    "collections.": "Counter deque OrderedDict defaultdict namedtuple",
    "math.": "sqrt floor ceil gcd sin cos log pow factorial",
    "random.": "randint choice shuffle sample uniform",
    "str.": "join split strip replace upper lower format startswith endswith find",
    "list.": "append sort extend pop",
    "dict.": "get items keys update",
    "pathlib.Path.": "exists mkdir read_text write_text open glob",
    "functools.": "reduce partial lru_cache wraps",
    "time.": "sleep time",
    "textwrap.": "wrap fill dedent indent",
    "": "len range sorted print open enumerate zip map max min sum abs isinstance",
    "glob.": "glob",
    "copy.": "copy deepcopy",
    "heapq.": "heappush heappop",
}
FAMOUS_NAMES = {prefix + name for prefix, names in FAMOUS.items() for name in names.split()}
WELL_KNOWN_MODULES = (
    "os.path shutil json re itertools math random os builtins collections pathlib functools glob heapq "
    "bisect string time tempfile copy textwrap subprocess fnmatch operator statistics contextlib hashlib io "
    "threading urllib.parse csv"
)
SKIPPED_PACKAGES = (
    "test tests site-packages idlelib lib2to3 turtledemo encodings pydoc_data distutils msilib ensurepip "
    "tkinter ctypes xmlrpc wsgiref dbm curses lib-dynload venv re xml email html sqlite3"
)
LONGEST_FILE = 60_000
LONGEST_ANSWER = 320


@dataclass(frozen=True)
class Doc:
    """One documented name of the library; `fame` is "famous", "known" or "other"."""

    name: str
    text: str
    fame: str = "other"


def clean(doc: str | None) -> str:
    """A docstring as an answer: dedented, ASCII, cut after a whole paragraph or line; empty if useless."""
    text = inspect.cleandoc(doc or "").strip()
    if not text.isascii() or len(text) < 12:
        return ""
    if len(text) > LONGEST_ANSWER:
        head = text[:LONGEST_ANSWER]
        text = head[: max(head.rfind("\n\n"), 0)] or head[: max(head.rfind("\n"), 0)] or head[: head.rfind(" ")]
    return text.strip()


def public(owner: object, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """(name, value) of the documented public attributes among `names`; no plain constants, no modules."""
    for name in sorted(names):
        value = inspect.getattr_static(owner, name, None)
        documented = getattr(value, "__doc__", None) is not type(value).__doc__
        if not name.startswith("_") and documented and not inspect.ismodule(value):
            yield name, value


def known_docs() -> list[Doc]:
    """Return docstrings of common modules, by import (many are written in C and have no source)."""
    docs = {}

    def add(name: str, value: object) -> None:
        fame = "famous" if name in FAMOUS_NAMES else "known"
        docs.setdefault(name, Doc(name, clean(value.__doc__), fame))

    for module_name in WELL_KNOWN_MODULES.split():
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else module_name + "."
        for name, value in public(module, getattr(module, "__all__", None) or dir(module)):
            add(prefix + name, value)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                for attribute, member in public(value, vars(value)):
                    add(f"{prefix}{name}.{attribute}", member)
    return [doc for doc in docs.values() if doc.text]


def source_files() -> list[tuple[str, str]]:
    """Return (module name, source) of the library's Python files, sorted, without rarely read packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(p in SKIPPED_PACKAGES.split() or p.startswith(("config-", "_sysconfig", "__")) for p in parts[:-1]):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8", errors="replace")
        if source.isascii() and not name.startswith("_") and 400 < len(source) < LONGEST_FILE:
            found.append((name, source))
    return found


def source_docs(module: str, source: str) -> Iterator[Doc]:
    """Docstrings of the public functions, classes and methods of one file, from its syntax tree."""

    def walk(node: ast.AST, prefix: str) -> Iterator[Doc]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name[0] != "_":
                name = f"{prefix}.{child.name}"
                yield Doc(name, clean(ast.get_docstring(child)))
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, name)

    tree = ast.parse(source)
    yield Doc(f"the {module} module", clean(ast.get_docstring(tree)))
    yield from walk(tree, "os.path" if module == "posixpath" else module)


def code_pieces(source: str) -> list[str]:
    """One file cut before every top-level function or class, so that a document may begin with `def`."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            starts.append(min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1)
    pieces = ["".join(lines[a:b]).strip() for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return [p + "\n" for p in pieces if len(p) > 60]


def with_summaries(source: str, withheld: set[str]) -> str:
    """The source with every docstring cut to its first line, so that a body soon follows its head.

    Those whose first line is no sentence go altogether, and those whose text is withheld: code does not teach what
    chats withhold.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        doc = ast.get_docstring(node) if documented else None
        if not doc or node.body[0].lineno == getattr(node, "lineno", 0):  # none, or on the line of the head
            continue
        statement = node.body[0]
        indent, summary = " " * statement.col_offset, doc.strip().partition("\n")[0]
        short = f'{indent}"""{summary}"""\n'
        if clean(doc) in withheld or "\\" in summary or not summary.endswith("."):
            short = "" if len(node.body) > 1 else f"{indent}pass\n"
        first, last = statement.lineno - 1, statement.end_lineno
        lines[first:last] = [short] + [""] * (last - first - 1)  # the other nodes' line numbers stay valid
    return "".join(lines)
