"""Compile texts of kernels in sequence for a parent that may kill this process: run with `python -m` and a way.

A line of stdin is a job in JSON (`compile_jobs.job_of`); a line of stdout is its answer, {"refused": message or
null}. The first answer, {"ready": true}, precedes all jobs.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Job = Mapping[str, Any]


def by_mlx(job: Job) -> str | None:
    """Compile and run a job on the GPU, with zeros for missing values; return the message if it is refused."""
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
        return f"{type(e).__name__}: {e}"
    return None


def by_front_end(job: Job) -> str | None:
    """Check a job's text with clang's front end; return the findings if it is refused."""
    from ..emulator.front_end import check

    return "\n".join(map(str, check(job["text"], job["name"]))) or None


WAYS: dict[str, Callable[[Job], str | None]] = {"metal": by_mlx, "front end": by_front_end}


def main(way: str) -> None:
    """Answer jobs until stdin ends; other output to stdout is redirected to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        answer({"refused": WAYS[way](json.loads(line))})


if __name__ == "__main__":
    main(sys.argv[1])
