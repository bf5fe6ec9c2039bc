"""Imports point one way, and the checklist's hard limits hold."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlx_mtp"

# What each module or subpackage may import of the project; nothing else.
ALLOWED = {
    "spec": set(),
    "recurrent_cache": set(),
    "plain_cache": set(),
    "cache": {"plain_cache", "recurrent_cache"},
    "plain": {"checkpoint", "plain_cache"},
    "report": {"checkpoint"},
    "stats": set(),
    "accept": set(),
    "rejection": set(),
    "sampling": {"rejection"},
    "draft_choice": {"rejection", "sampling"},
    "checkpoint": set(),
    "norms": {"checkpoint"},
    "emulator": set(),
    "kernels": set(),
    "trial_run": set(),
    "machine_file": set(),
    "whole_file": set(),
    "trial_memory": {"__init__", "kernels", "machine_file", "whole_file"},
    "costs": set(),
    "cost_memory": {"__init__", "costs", "machine_file", "whole_file"},
    "controller": {"costs"},
    "trial": {"trial_memory", "trial_run"},
    "layers": {"kernels", "spec"},
    "sites": {"cache", "kernels", "layers", "recurrent_cache"},
    "switch": {"kernels", "layers", "sites", "trial"},
    "models": {"layers", "spec"},
    "opening": set(),
    "fingerprint": set(),
    "prompt_cache": {"cache", "opening", "plain_cache", "recurrent_cache"},
    "saved_cache": {"cache", "fingerprint", "memory", "opening", "prompt_cache"},
    "agreement": {"prompt_cache"},
    "drafter": {"checkpoint", "models"},
    "draft_vocab": {"layers", "whole_file"},
    "draft": {"draft_choice", "prompt_cache"},
    "footprint": {"draft", "plain_cache", "prompt_cache"},
    "machine_memory": set(),
    "memory": {"footprint", "machine_memory", "plain_cache", "prompt_cache"},
    "lookup": set(),
    "prefill": {"draft", "prompt_cache", "sampling"},
    "cycle": {
        *("accept", "compile_choice", "controller", "draft", "draft_choice", "lookup", "prefill", "prompt_cache"),
        *("sampling", "stats"),
    },
    "decode": {"cycle", "lookup", "prefill", "prompt_cache"},
    "compile_choice": set(),
    "recorded": {
        *("cache", "controller", "cycle", "draft", "draft_choice", "prefill", "prompt_cache", "sampling", "stats")
    },
    "compiled": {"compile_choice", "controller", "cycle", "draft", "prefill", "recorded"},
    "contents": {"checkpoint", "spec"},
    "naming": {"contents"},
    "hub_headers": {"checkpoint"},
    "load": {
        *("agreement", "checkpoint", "contents", "draft_vocab", "drafter", "memory", "models", "naming", "norms"),
        *("plain", "report", "switch", "trial"),
    },
    "inspect_checkpoint": {
        *("checkpoint", "contents", "drafter", "footprint", "load", "machine_memory", "memory", "models", "naming"),
        *("norms", "prompt_cache", "report"),
    },
    "precision": set(),
    "tensor_file": set(),
    "unfinished": set(),
    "source": {"checkpoint", "contents", "load", "models", "precision", "report"},
    "convert": {"checkpoint", "precision", "report", "source", "tensor_file", "unfinished"},
    "planning": {
        *("compile_choice", "compiled", "controller", "cost_memory", "costs", "plain_cache", "prompt_cache"),
        "sampling",
    },
    "generate": {
        *("cycle", "decode", "machine_memory", "memory", "planning", "prompt_cache", "sampling", "stats"),
    },
    "session": {"generate", "machine_memory", "memory", "opening", "prompt_cache", "stats"},
    "lossless": {"agreement", "cache", "generate", "prompt_cache", "sampling", "session", "stats"},
    "demo": {"load", "generate", "models", "layers", "spec", "stats"},
    "bench": {
        *("__init__", "cache", "checkpoint", "compiled", "controller", "costs", "cycle", "decode", "demo", "draft"),
        *("emulator", "generate", "kernels", "layers", "load", "lookup", "machine_file", "models", "planning"),
        *("prefill", "prompt_cache", "recurrent_cache", "report", "sampling", "session", "sites", "spec", "stats"),
        *("switch", "trial", "trial_run", "whole_file"),
    },
    "cli": {
        *("__init__", "bench", "checkpoint", "convert", "demo", "draft_vocab", "emulator", "generate", "hub_headers"),
        *("inspect_checkpoint", "kernels", "load", "lossless", "machine_memory", "memory", "opening"),
        *("prompt_cache", "report", "saved_cache", "session", "stats", "whole_file"),
    },
    "__init__": {"generate", "load", "memory", "prompt_cache", "report", "saved_cache", "stats"},
    "__main__": {"cli"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def project_imports(file: Path) -> set[str]:
    """Modules and subpackages of mlx_mtp that a file imports, at any depth of its code."""
    found = set()
    package = ["mlx_mtp", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            head, *rest = name.split(".")
            if head == "mlx_mtp" and rest:
                inner = (PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").exists()
                found.add(rest[0] if inner else "__init__")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    part = part_of(file)
    assert part in ALLOWED, f"{part} is not in the import table"
    assert project_imports(file) - {part} <= ALLOWED[part]


def test_the_table_has_no_cycle():
    seen: set[str] = set()
    while len(seen) < len(ALLOWED):
        free = {p for p, needs in ALLOWED.items() if p not in seen and needs - {"__init__"} <= seen}
        assert free, f"cycle among {set(ALLOWED) - seen}"
        seen |= free


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_hard_limits(file):
    text = file.read_text()
    assert text.count("\n") <= (600 if part_of(file) == "models" else 400)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, node.name
    if part_of(file) not in ("cli", "demo"):
        calls = [n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
        assert not any(isinstance(f, ast.Name) and f.id == "print" for f in calls)


def test_nothing_outside_models_knows_a_family():
    families = [p.stem for p in (PACKAGE / "models").glob("*.py") if p.stem != "__init__"]
    for file in FILES:
        if part_of(file) in ("models", "demo") or file.name == "kernels_cases.py":  # shapes of released models
            continue
        assert not [f for f in families if f in file.read_text()], file
