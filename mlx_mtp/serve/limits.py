"""Define the limits of an engine's queue."""

from dataclasses import dataclass


@dataclass
class Limits:
    """Maximum numbers of active and of queued jobs, and seconds without a job after which a model is unloaded."""

    active: int = 8
    queued: int = 64
    idle_unload: float = float("inf")


class QueueFull(Exception):
    """Raised if the queue has no room for the jobs of a request, or the engine is ending."""
