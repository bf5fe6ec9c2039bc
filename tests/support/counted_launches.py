"""Count the launches of a family's layers in a process in which `mx.compile` has recorded nothing before.

    PYTHONPATH=.:bench python tests/support/counted_launches.py FAMILY    # a name of bench/launches/models.py

Prints a JSON object: by the kernels that are on, "none" or "all", the launches of each kind of layer.
"""

import json
import sys

import counts
from launches import steps
from launches.models import MODELS

from mlx_mtp.tuning import kernel_switch


def counted(name: str) -> dict[str, dict[str, int]]:
    """Return the launches of a family's layers."""
    build, layers = MODELS[name]
    model, found = steps.make(build), {}
    sites, second = kernel_switch.place(model), steps.StartState(model, counts.ROWS)
    for on, ops in (("none", ()), ("all", steps.EVERY_OP)):
        steps.switch_kernels(sites, ops)
        found[on] = {of: many for of, (_, many) in steps.of_layers([second, second], layers).items()}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(counted(sys.argv[1])))
