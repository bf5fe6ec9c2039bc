"""Agree with the other ranks before a cycle is submitted, and on the kernels to switch off after an error."""

from contextlib import suppress

from ..tuning.kernel_fallback import KernelRefused, Trouble, newly_refused
from .agreement import Agreement
from .decoder import Decoder


def agree(d: Decoder) -> None:
    """Run each kernel that the next graph launches for the first time; on ranks also receive rank 0's next plan.

    On ranks `d.stopping` is set, too. Raises KernelRefused, on every rank, if any rank refuses a kernel, and as
    `Agreement.meet`.
    """
    refused = newly_refused()
    if isinstance(d.control, Agreement):
        d.control.meet(d.history, d.pending_rows, refused)
        d.stopping = d.control.stopping
    elif refused:
        raise refused


def disable_kernels(d: Decoder, error: Trouble) -> None:
    """Switch off the kernels that may have caused an error, on every rank if a kernel is refused (`Fallback.take`).

    `Fallback.take` raises if no kernel can be the cause. It leaves all kernels on after the first failure of a graph
    whose kernels each run by themselves.
    """
    if isinstance(d.control, Agreement) and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            d.control.meet(d.history, d.pending_rows, error)
    d.fallback.take(error, len(d.history.tokens))
