"""Define a place for one of several models, and a request that waits for a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..decoding.buffer_count import Buffers
from .catalog import Offer
from .engine import Engine
from .fields import ModelInfo
from .job import Failed, Served


class Ready(NamedTuple):
    """A loaded model: what its engine runs, the facts for requests, and its Metal buffers."""

    served: Served
    info: ModelInfo
    buffers: Buffers


@dataclass(eq=False)
class Slot:
    """One of several models. engine: runs its jobs while it is loaded. ready: None while it is not.

    pins: number of requests that were granted the model and have not queued their jobs yet. used: last time at which
    it was in use, of time.monotonic(). progress: of its load, as (stage, units done, their total). error: of its last
    load, else "". loads: number of completed loads.
    """

    offer: Offer
    engine: Engine
    ready: Ready | None = None
    pins: int = 0
    used: float = 0.0
    progress: tuple[str, int, int] | None = None
    error: str = ""
    loads: int = 0

    @property
    def state(self) -> str:
        return self.engine.state

    @property
    def is_busy(self) -> bool:
        return bool(self.pins) or self.engine.is_busy

    def show(self, stage: str, done: int, total: int) -> None:
        """Set `progress`; a `watcher` of the load."""
        self.progress = stage, done, total

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and the prefix cache, 0 while it is not loaded."""
        return self.offer.size + self.ready.served.tree.nbytes if self.ready else 0


@dataclass(eq=False)
class Ticket:
    """A request that waits for a model. resolve: called with None once it has the model, or with a failure.

    granted: it has the model, so that it counts among the slot's pins.
    """

    slot: Slot
    resolve: Callable[[Failed | None], None]
    granted: bool = False
