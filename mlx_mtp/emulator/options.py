"""Options of emulated launches, and the exceptions that launches raise."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ALLOWABLE = ("races", "unwritten", "uninitialised", "mem_none")
ORDERS = {"forward": 0, "reverse": 1}
# Orders in which a simdgroup_matrix adds c and eight products, as `emulated/matrix.h` defines them.
MATRIX_ORDERS = ("forward", "backward", "products first", "pairs", "strides", "pairs in turn", "halves")
MATRIX_ORDERS += ("halves by pairs", "wide", "truncated")
CONTRACTIONS = {"off": [], "on": ["-mfma"], "fast": ["-mfma"]}  # with clang's flags on x86-64


@dataclass(frozen=True)
class EmulatorOptions:
    """Options of emulated launches; ValueError for an unknown value.

    `allow` names faults to ignore: "races"; "unwritten" output elements, which then hold bytes of 0xff;
    "uninitialised" memory, which may then be read; "mem_none": barriers with `mem_flags::mem_none` then order memory.
    `order` of threads and threadgroups is "forward", "reverse" or a seed from 2 to 2^32 - 1. A thread may run
    `max_steps` blocks of code. `optimize` and `fp_contract` are clang's options. A simdgroup_matrix adds its products
    in `matrix_order`, of MATRIX_ORDERS; matrix_fused: whether a product is added without being rounded before.
    traffic: whether accesses are counted. function_constants: values by name.
    """

    allow: frozenset[str] | set[str] | tuple[str, ...] = ()
    order: str | int = "forward"
    max_steps: int = 20_000_000
    optimize: int = 2
    fp_contract: str = "off"
    matrix_order: str = "forward"
    matrix_fused: bool = True
    traffic: bool = True
    function_constants: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        if unknown := set(self.allow) - set(ALLOWABLE):
            raise ValueError(f"allow has {sorted(unknown)}; allowed are {', '.join(ALLOWABLE)}")
        if not (self.order in ORDERS or (isinstance(self.order, int) and 2 <= self.order < 2**32)):
            raise ValueError(f"order is {self.order!r}; it must be 'forward', 'reverse' or a seed from 2 to 2^32 - 1")
        if self.optimize not in (0, 1, 2, 3):
            raise ValueError(f"optimize is {self.optimize!r}; it must be 0, 1, 2 or 3")
        if self.fp_contract not in CONTRACTIONS:
            raise ValueError(f"fp_contract is {self.fp_contract!r}; it must be one of {', '.join(CONTRACTIONS)}")
        if self.matrix_order not in MATRIX_ORDERS:
            raise ValueError(f"matrix_order is {self.matrix_order!r}; it must be one of {', '.join(MATRIX_ORDERS)}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1")


class KernelFault(RuntimeError):
    """A kernel did what Metal leaves undefined; the message names it and, if known, thread, place and source line."""


class CompileError(RuntimeError):
    """A kernel cannot be compiled, linked or loaded, has too many buffers, or needs what the emulator lacks."""
