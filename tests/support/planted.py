"""Read the small kernels of `planted/`: some have one error each, others look similar and have none.

A case in these files has, in this order, `=== name`, optionally `=> pattern of a finding`, optionally `with kind`,
optionally a header and `---`, and a body. Its inputs are a [64] of T in device memory, b [4] of int32 in constant
memory and s, a float; its output `out` is of T. Its template is T (bfloat, or half) and N = 3.
"""

import re
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from metal_texts import collected

from mlx_mtp.emulator.texts import LaunchText

DIRECTORY = Path(__file__).with_name("planted")
CASE = re.compile(r"=== (.*)\n(?:=> (.*)\n)?(?:with (.*)\n)?((?:.*\n)*?---\n)?((?:.*\n?)*)")


class Plant(NamedTuple):
    """A kernel's header and body, a pattern of the finding on it, and its kind."""

    header: str
    body: str
    message: str = ""
    kind: str = ""  # "half", "atomic" (outputs), or "<n> more inputs"

    @property
    def text(self) -> LaunchText:
        """Return the source that MLX generates from it."""
        dtype, atomic = mx.float16 if self.kind == "half" else mx.bfloat16, self.kind == "atomic"
        more = int(self.kind.split()[0]) if "more inputs" in self.kind else 0
        names = ["a", "b", "s", *(f"x{i}" for i in range(more))]
        about = "".join(f"// {name}_shape\n" for name in names[3:])  # which MLX then passes
        arrays = [mx.zeros(64, dtype), mx.zeros(4, mx.int32), mx.array(1.0), *[mx.zeros((8, 8))] * more]
        source = f"uint i = thread_position_in_grid.x;\n{about}{self.body}"
        outputs = {"output_shapes": [(64,)], "output_dtypes": [mx.uint32 if atomic else dtype]}
        how = {"source": source, "header": self.header, "atomic_outputs": atomic}
        with collected() as found:
            kernel = mx.fast.metal_kernel(name="probe", input_names=names, output_names=["out"], **how)
            threads = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
            kernel(inputs=arrays, template=[("T", dtype), ("N", 3)], **threads, **outputs)
        return found[0]


def _read(file: str) -> dict[str, Plant]:
    cases = re.split(r"\n(?==== )", (DIRECTORY / file).read_text())[1:]
    found = [match.groups() for match in map(CASE.fullmatch, cases) if match]
    assert len(found) == len(cases)
    return {
        name: Plant((header or "").removesuffix("---\n"), body, message or "", kind or "")
        for name, message, kind, header, body in found
    }


REQUIRED, MORE, CLEAN = (_read(f"{name}.txt") for name in ("required", "more", "clean"))
