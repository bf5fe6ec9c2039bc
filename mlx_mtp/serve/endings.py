"""Decide when a job ends, end its generator, and convert its exception to an event."""

import contextlib
import logging
import time
from typing import Any

from ..cache.prompt_cache import PromptCache
from ..machine.errors import first_line, with_type, without_directories
from .job import Failed, Interrupted, Job

log = logging.getLogger("mlx_mtp.serve")


def must_end(job: Job) -> bool:
    """Return whether a job must end now: its client has disconnected, or it has reached its time limit."""
    return job.cancelled or time.monotonic() > job.deadline


def closed(steps: Any) -> PromptCache | None:
    """Interrupt the generator of a job or a prefill; return the prompt cache of a job, None if it has none."""
    try:
        steps.throw(Interrupted)
    except StopIteration as end:
        return end.value
    except Interrupted:
        return None
    steps.close()
    return None


def failed_by(error: BaseException) -> Failed:
    """Convert an exception to an event: status 400 for a ValueError, which the request caused; else log it, 500.

    Paths on the server are left out, except their last names.
    """
    if isinstance(error, ValueError):
        return Failed(400, without_directories(first_line(error)))
    with contextlib.suppress(BaseException):
        log.error("a request failed", exc_info=error)
    return Failed(500, without_directories(with_type(error)))
