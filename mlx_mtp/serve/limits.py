"""Define the limits of an engine's queue."""

from dataclasses import dataclass


@dataclass
class JobLimits:
    """The maximum numbers of active and of queued jobs, with several models of all together.

    idle_unload: seconds without a job after which a model is unloaded, unless a request states others.
    """

    active: int = 8
    queued: int = 64
    idle_unload: float = float("inf")


class QueueFull(Exception):
    """Raised if the queue has no room for the jobs of a request, or the engine is ending."""
