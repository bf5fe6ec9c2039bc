"""Record the functions of the package that each test enters: a pytest plugin for `bench/mutations.py trace`."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

PACKAGE = str(Path(os.environ.get("TRACE_ROOT", ".")) / "mlx_mtp") + "/"
_entered: set[tuple] = set()
_known: dict = {}


def _note(frame, event, arg):
    code = frame.f_code
    if code not in _known:
        inside = code.co_filename.startswith(PACKAGE)
        _known[code] = (code.co_filename.removeprefix(PACKAGE), code.co_qualname) if inside else None
    if _known[code]:
        _entered.add(_known[code])


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    _entered.clear()
    tic = time.perf_counter()
    sys.settrace(_note)
    yield
    sys.settrace(None)
    entry = {"id": item.nodeid, "s": time.perf_counter() - tic, "f": sorted(_entered)}
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    with Path(f"{os.environ['TRACE_OUT']}.{worker}").open("a") as file:
        file.write(json.dumps(entry) + "\n")
