"""Define a place for one of several models, and a request that waits for a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .catalog import ModelFacts
from .engine import Engine
from .fields import ModelInfo
from .job import RequestFailed, Served


class Ready(NamedTuple):
    """A loaded model: what its engine runs, and its facts for requests."""

    served: Served
    info: ModelInfo


@dataclass(eq=False)
class ModelSlot:
    """One of several models. offer: its facts and name. engine: runs its jobs while it is loaded.

    ready: None while it is not loaded. pins: number of requests that were granted the model and have not queued their
    jobs yet. used: time.monotonic() at which it was last in use. progress: (stage, units done, their total) of the
    load that runs, None before its first report. error: why its last load failed, else "". loads: number of completed
    loads.
    """

    offer: ModelFacts
    engine: Engine
    ready: Ready | None = None
    pins: int = 0
    used: float = 0.0
    progress: tuple[str, int, int] | None = None
    error: str = ""
    loads: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self.pins) or self.engine.is_busy

    def show(self, stage: str, done: int, total: int) -> None:
        """Set `progress`; called during the load, as `watcher` of `machine.progress`."""
        self.progress = stage, done, total

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and of the prefix cache in memory, 0 while the model is not loaded."""
        return self.offer.size + self.ready.served.tree.nbytes if self.ready else 0


@dataclass(eq=False)
class Ticket:
    """A request that waits for the model of `slot`. resolve: called once, with None at the grant or with a failure.

    granted: the request was granted the model, and counts among the slot's pins.
    """

    slot: ModelSlot
    resolve: Callable[[RequestFailed | None], None]
    granted: bool = False
