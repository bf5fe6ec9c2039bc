"""Compile texts of kernels in sequence for a parent that may kill this process: run with `python -m` and a way.

A line of stdin is a job in JSON (`compile_jobs.job_of`); a line of stdout is its answer, {"refused": message or
null}, and from MLX on a GPU also "most_threads", see `most_threads`. The first answer, {"ready": true}, precedes all
jobs.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

CompileJob = Mapping[str, Any]
CompileAnswer = dict[str, Any]
TOO_MANY = 2048  # threads of a group: twice what any Apple GPU grants
MOST = re.compile(r"maximum allowed threads per threadgroup \((\d+)\)")


def by_mlx(job: CompileJob) -> CompileAnswer:
    """Compile and run a job with MLX on the GPU, with zeros for missing values.

    Returns a dict: "refused", the type and message of MLX's error, or None; and, unless refused, "most_threads".
    """
    import mlx.core as mx

    def value(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        shape, dtype = given["shape"], getattr(mx, given["dtype"])
        return mx.array(given["values"], dtype).reshape(shape) if "values" in given else mx.zeros(shape, dtype)

    call = dict(job["call"])
    call["inputs"] = [value(given) for given in call["inputs"]]
    call["template"] = [(name, getattr(mx, v) if isinstance(v, str) else v) for name, v in call["template"]]
    call["output_dtypes"] = [getattr(mx, name) for name in call["output_dtypes"]]
    try:
        launch: Any = mx.fast.metal_kernel(**job["kernel"])
        mx.eval(launch(**call))
    except Exception as e:
        return {"refused": f"{type(e).__name__}: {e}"}
    return {"refused": None, "most_threads": most_threads(launch, call)}


def most_threads(launch: Callable[..., Any], call: Mapping[str, Any]) -> int | None:
    """Return a compiled kernel's maxTotalThreadsPerThreadgroup, which is smaller the more registers a thread has.

    MLX names it in the error for a larger group, which it raises before anything runs. None without a GPU, or if the
    error does not name it.
    """
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    try:
        mx.eval(launch(**{**call, "grid": (TOO_MANY, 1, 1), "threadgroup": (TOO_MANY, 1, 1)}))
    except (RuntimeError, ValueError) as e:
        named = MOST.search(str(e))
        return int(named[1]) if named else None
    return None


def by_front_end(job: CompileJob) -> CompileAnswer:
    """Check a job's text with clang's front end; return {"refused": the findings, one a line, or None}."""
    from ..emulator.front_end import check

    return {"refused": "\n".join(map(str, check(job["text"], job["name"]))) or None}


WAYS: dict[str, Callable[[CompileJob], CompileAnswer]] = {"metal": by_mlx, "front end": by_front_end}


def main(way: str) -> None:
    """Answer the jobs on stdin, in JSON lines on stdout, until stdin ends; way: "metal" or "front end".

    Other output to stdout is redirected to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        answer(WAYS[way](json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
