"""Keep a large model's weights resident with MLX's wired limit, set once per load while nothing runs.

Changing the limit while another stream was busy has caused kernel panics in macOS (MLX issue 3186), so no generation
changes it.
"""

import mlx.core as mx

from .memory import in_gb, working_set

AUTO, OFF = "auto", "off"
WiredLimit = int | str
NEARLY_ALL = 0.75  # macOS keeps a model resident by itself up to this share of the recommended working set
_set = 0  # bytes; never lowered within a process


def check_wired_limit(limit: WiredLimit) -> None:
    """Raise ValueError unless the limit is "auto", "off" or an integer of bytes, 0 or more.

    The maximum is the recommended working set of a GPU as default device; there is none if that is unknown.
    """
    if limit in (AUTO, OFF):
        return
    most = working_set()
    if type(limit) is not int or limit < 0:
        raise ValueError(f"wired_limit={limit!r}: expected bytes (at least 0), {AUTO!r} or {OFF!r}")
    if most is not None and limit > most:
        recommended = f"this GPU recommends at most {in_gb(most)} GB"
        raise ValueError(f"wired_limit={limit}: {recommended}; `sudo sysctl iogpu.wired_limit_mb=MB` raises that")


def wire(weights: int, limit: WiredLimit = AUTO) -> int:
    """Set MLX's wired limit for a model of `weights` bytes; return the limit that this process has set, 0 for none.

    "auto" sets the recommended working set if the model needs more than NEARLY_ALL of it; a number of bytes is set as
    it is. "off", a limit that is not higher than the one set, and a device without a working set change nothing.
    Call it in a turn after the load; before a change it waits for submitted work.
    """
    global _set
    most = working_set()
    if most is None or limit == OFF:
        return _set
    wanted = (most if weights > NEARLY_ALL * most else 0) if limit == AUTO else int(limit)
    if wanted > _set:
        mx.synchronize()
        mx.set_wired_limit(wanted)
        _set = wanted
    return _set
