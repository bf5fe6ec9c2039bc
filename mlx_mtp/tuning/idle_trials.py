"""Try what a load left of the kernel trials while nobody waits for the model, as while a user types."""

import threading
import warnings
from contextlib import AbstractContextManager, suppress
from typing import Any

import mlx.core as mx

from ..machine.errors import with_type
from .kernel_switch import put_on


class IdleTrials(AbstractContextManager):
    """Trials in a thread of their own while entered; leaving waits for the step under way, a compilation or a timing.

    MLX compiles under a lock that every evaluation needs, so nothing is compiled once somebody waits. Kernels change
    when this is left, in the thread that generates: never in the middle of an answer.
    """

    def __init__(self, model: Any):
        self.model = model
        # Ranks have the same kernels, which none of them changes alone.
        self.trials: Any = None if model.ranks else model.runtime.trials
        self.wanted = threading.Event()  # somebody waits
        self.thread: threading.Thread | None = None
        self.trouble: Exception | None = None

    def __enter__(self) -> "IdleTrials":
        if self.trials and self.trials.waiting(self.trials.asked()):
            # What is not computed yet, as RoPE's angles, can be computed in this thread only.
            mx.eval([a for module in self.model.modules() for a in module.values() if isinstance(a, mx.array)])
            self.thread = threading.Thread(target=self._go_on, daemon=True)
            self.thread.start()
        return self

    def _go_on(self) -> None:
        try:
            self.trials.go_on(self.wanted.is_set)
        except Exception as e:  # of stock MLX, as where memory is short
            self.trouble = e

    def __exit__(self, *_: Any) -> None:
        self.wanted.set()
        if self.thread is None:
            return
        while self.thread.is_alive():
            with suppress(KeyboardInterrupt):  # what it is to stop has not begun
                self.thread.join()
        if self.trouble:
            self.model.runtime.trials = None
            warnings.warn(f"no more kernels are tried: {with_type(self.trouble)}", stacklevel=2)
        put_on(self.model, self.trials)
