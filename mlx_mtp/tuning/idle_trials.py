"""Run kernel trials that a load left undone, and then the check of rows, while the model is idle."""

import threading
import warnings
from contextlib import AbstractContextManager, suppress
from typing import Any

import mlx.core as mx

from ..machine.errors import with_type
from .kernel_switch import put_on


class IdleTrials(AbstractContextManager):
    """Context that runs trials in a thread, or a check of rows if none is left; leaving it waits for the current one.

    MLX compiles under a lock that every evaluation needs, so no compilation starts after the exit has begun. The
    verdicts are applied at the exit, in the thread that generates, so kernels never change during an answer. Nothing
    runs for a model that is split over ranks or has no needed trials left. An error of MLX's operations ends all
    further trials, or passes of the check, with a warning; it is not raised.
    check: the model's `RowCheck`, None to check no rows.
    """

    def __init__(self, model: Any, check: Any = None):
        self.model, self.check = model, check
        # All ranks need the same kernels, so none of them tries more alone.
        self.trials: Any = None if model.ranks else model.runtime.trials
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __enter__(self) -> "IdleTrials":
        untried = self.trials and self.trials.has_untried(self.trials.needed())
        if untried or (self.check and self.check.due and not self.model.ranks):
            self.check = None if untried else self.check  # its findings are those of the kernels that are on
            # Lazy arrays, such as RoPE's angles, can be evaluated in this thread only.
            mx.eval([a for module in self.model.modules() for a in module.values() if isinstance(a, mx.array)])
            self.thread = threading.Thread(target=self._try_rest, daemon=True)
            self.thread.start()
        return self

    def _try_rest(self) -> None:
        try:
            if self.check is None:
                self.trials.try_rest(self.stop.is_set)
            while self.check and not self.stop.is_set() and self.check.step():
                pass
        except Exception as e:  # of MLX's operations, as if memory is short
            self.error = e

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        if self.thread is None:
            return
        while self.thread.is_alive():
            with suppress(KeyboardInterrupt):  # Ctrl-C is for the answer, which has not begun
                self.thread.join()
        if self.error:
            self.model.runtime.trials = self.model.runtime.trials if self.check else None
            what = "rows are not checked" if self.check else "no more kernels are tried"
            warnings.warn(f"{what}: {with_type(self.error)}", stacklevel=2)
        if self.check is None:
            put_on(self.model, self.trials)
