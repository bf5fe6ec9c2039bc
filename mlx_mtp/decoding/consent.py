"""Agree with the other ranks before a cycle is submitted, and on the kernels to switch off after an error."""

from contextlib import suppress

from ..tuning.kernel_fallback import KernelRefused, Trouble, newly_refused
from .agreement import Agreement
from .decoder import Decoder


def agree(d: Decoder) -> None:
    """Run kernels that the next graph launches first; raise KernelRefused, on every rank, if any rank refuses one."""
    refused = newly_refused()
    if isinstance(d.control, Agreement):
        d.control.meet(d.history, d.pending_rows, refused)
        d.stopping = d.control.stopping
    elif refused:
        raise refused


def disable_kernels(d: Decoder, error: Trouble) -> None:
    """Switch off, on every rank, the kernels that caused an error; raise MLX's error if none can have caused it."""
    if isinstance(d.control, Agreement) and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            d.control.meet(d.history, d.pending_rows, error)
    d.fallback.take(error, len(d.history.tokens))
