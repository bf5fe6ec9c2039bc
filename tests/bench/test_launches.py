"""Check how launches are counted (views are free, copies count, mx.compile fuses), and the stated counts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import counts
import mlx.core as mx
import mlx.nn as nn
import pytest
from compile_mode import ENABLED, NO_FUSE, set_mode
from launches import graph
from launches.models import KINDS

from mlx_mtp.bench.roofline import cost


def launches(fn, *shape):
    return graph.launches(fn, lambda: [mx.zeros(shape)])


def test_a_compiled_function_is_one_launch():
    swiglu = mx.compile(lambda x: [nn.silu(x) * x + 1])
    try:
        set_mode(ENABLED)  # tests run in a mode that fuses nothing
        assert launches(swiglu, 4, 4).total() == 1
    finally:
        set_mode(NO_FUSE)
    assert launches(lambda x: [mx.sigmoid(x) * x + 1], 4, 4).total() == 3


@pytest.mark.parametrize(
    ("fn", "copied"),
    [
        (lambda x: x.reshape(4, 3, 8).reshape(2, -1), 0),
        (lambda x: x.reshape(1, 4, 3, 8)[..., 4:].reshape(1, 4, -1), 1),
        (lambda x: x.reshape(1, 4, 3, 8)[..., 4:].reshape(1, 12, 4), 0),  # heads are evenly spaced
        (lambda x: mx.split(x, 2, axis=1)[1].reshape(4, 3, 4), 0),
        (lambda x: mx.split(x, 2, axis=1)[1].flatten(), 1),
        (lambda x: x.reshape(1, 4, 3, 8).swapaxes(1, 2).reshape(1, 3, -1), 1),
        (lambda x: x[:1].reshape(1, 1, 3, 8).swapaxes(1, 2).reshape(1, 1, 24), 0),  # one row: no copy
        (lambda x: mx.exp(x.T).flatten(), 1),  # an elementwise result has the layout of its input
        (lambda x: (x.T @ x).flatten(), 0),
        (lambda x: mx.broadcast_to(x[:, None, :1], (4, 5, 6)).flatten(), 1),
        (lambda x: x[None].squeeze(0)[::2].flatten(), 1),
    ],
)
def test_a_reshape_counts_where_mlx_copies(fn, copied):
    assert launches(lambda x: [fn(x)], 4, 24)["Copy"] == copied


def test_a_launch_waits_if_it_reads_an_output_since_the_last_barrier():
    def waits(fn):
        return graph.waits(fn, lambda: [mx.zeros((4, 4))])

    assert waits(lambda x: [mx.exp(x), mx.sin(x)]) == 0
    assert waits(lambda x: [mx.exp(mx.sin(x).T)]) == 1  # through a view
    assert waits(lambda x: [mx.exp(x) + mx.sin(x)]) == 1
    assert waits(lambda x: [mx.exp(mx.sin(mx.cos(x)))]) == 2


def test_inputs_of_a_kernel_are_copied_unless_it_reads_strides():
    def launched(ensure):
        kernel = mx.fast.metal_kernel(
            name="k", input_names=["x"], output_names=["y"], source=";", ensure_row_contiguous=ensure
        )
        how = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(4,)], "output_dtypes": [mx.float32]}
        return lambda x: kernel(inputs=[x[:, 8:]], **how)

    assert [launches_of_kernel(launched(ensure)) for ensure in (True, False)] == [1, 0]


def launches_of_kernel(fn):
    with graph.as_on_a_mac():
        return graph.copies(fn, mx.zeros((4, 24)))


def test_a_place_is_compared_and_written(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("| a | 1 |\n| b | 2 |\n")
    place = counts.Place(file, r"^\| b \| .*$", "| b | 3 |")
    assert place.found() == "| b | 2 |"
    place.write()
    assert file.read_text() == "| a | 1 |\n| b | 3 |\n"
    with pytest.raises(ValueError, match="0 places like"):
        counts.Place(file, r"^\| c .*$", "").found()


def test_the_kernels_readme_and_the_cost_model_state_the_launches_of_a_model():
    """One family without its cycles, in a process of its own; CI counts all (`python bench/counts.py`)."""
    name = "Qwen3.6-35B-A3B"
    root = Path(__file__).parents[2]
    program, paths = root / "tests/support/counted_launches.py", os.pathsep.join((str(root), str(root / "bench")))
    fuses = {key: value for key, value in os.environ.items() if key != "MLX_DISABLE_COMPILE"} | {"PYTHONPATH": paths}
    run = subprocess.run([sys.executable, program, name], capture_output=True, text=True, check=True, env=fuses)
    for on, found in json.loads(run.stdout).items():
        assert {of: cost.LAUNCHES[KINDS[name, of]][on][1] for of in found} == found, on
    (line,) = [line for line in counts.KERNELS.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert {of: int(re.search(rf"{of} \d+, (\d+)", line)[1]) for of in found} == found
