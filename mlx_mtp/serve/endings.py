"""End jobs, convert their exceptions to events, and keep the caches of finished ones for later prompts."""

import contextlib
import time
from collections import deque
from typing import Any

from ..cache.prompt_cache import PromptCache
from ..cache.prompt_prefix import shared
from ..machine.errors import first_line, with_type, without_directories
from .failures import log
from .job import DecodeRequest, Job, JobInterrupted, RequestFailed, Served, keep, with_adapter

MAX_FINISHED = 4  # responses whose conversations wait for idle time to be prefilled


def must_end(job: Job) -> bool:
    """Return whether a job must end now: its client has disconnected, or it has reached its time limit."""
    return job.cancelled or time.monotonic() > job.deadline


def closed(steps: Any) -> PromptCache | None:
    """Interrupt the generator of a job or a prefill; return the prompt cache of a job, None if it has none."""
    try:
        steps.throw(JobInterrupted)
    except StopIteration as end:
        return end.value
    except JobInterrupted:
        return None
    steps.close()
    return None


def failed_by(error: BaseException) -> RequestFailed:
    """Convert an exception to an event: status 400 for a ValueError, which the request caused; else log it, 500.

    Paths on the server are left out, except their last names.
    """
    if isinstance(error, ValueError):
        return RequestFailed(400, without_directories(first_line(error)))
    with contextlib.suppress(BaseException):
        log.error("a request failed", exc_info=error)
    return RequestFailed(500, without_directories(with_type(error)))


class FinishedJobs(deque[tuple[Job, PromptCache | None]]):
    """The last finished jobs of a model, at most MAX_FINISHED, the oldest first, each with its cache.

    The cache is None if the job returned none, or if the prefix tree may not hold rows computed by decoding.
    """

    def add(self, served: Served, job: Job, cache: PromptCache | None) -> None:
        """Append a job and its cache; if there are MAX_FINISHED, first remove the oldest job as `keep_oldest` does.

        cache: dropped if the tree may not hold decoded rows (`decoded` is False).
        """
        if len(self) == MAX_FINISHED:
            self.keep_oldest(served)
        tree = with_adapter(served, job.request.adapter).tree
        self.append((job, None if tree.decoded is False else cache))

    def keep_oldest(self, served: Served) -> None:
        """Remove the oldest job; if its cache is kept, store its rows in the prefix tree, if that may hold them."""
        keep_rows(served, *self.popleft())

    def keep_for(self, served: Served, request: DecodeRequest) -> None:
        """Store in the prefix tree the rows of finished jobs that a new prompt can reuse; the jobs stay here.

        These are jobs with the prompt's adapter whose prompt it continues, or whose cache it shares at least
        `chunking.least` tokens with: all prompts share the first tokens of the chat template.
        """
        prompt, adapter = request.prompt, request.adapter
        served = with_adapter(served, adapter)
        for job, cache in [found for found in self if found[0].request.adapter == adapter]:
            continues = prompt[: len(job.request.prompt)] == job.request.prompt
            if cache and (continues or shared(cache.tokens, prompt) >= served.tree.chunking.least):
                keep(served, prompt[:-1], cache)


def keep_rows(served: Served, job: Job, cache: PromptCache | None) -> None:
    """Store the rows of a job's cache in the prefix tree, if that may hold rows computed by decoding."""
    keep(with_adapter(served, job.request.adapter), cache.tokens if cache else [], cache)
