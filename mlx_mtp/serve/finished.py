"""Keep the caches of finished jobs until idle time, in which their conversations are prefilled."""

from collections import deque

from ..cache.prompt_cache import PromptCache
from ..cache.prompt_prefix import shared
from .job import DecodeRequest, Job, Served, keep, with_adapter

MAX_FINISHED = 4  # responses whose conversations wait for idle time to be prefilled


class FinishedJobs(deque[tuple[Job, PromptCache | None]]):
    """The last finished jobs of a model, the oldest first, each with its cache; None: its rows may not be stored."""

    def add(self, served: Served, job: Job, cache: PromptCache | None) -> None:
        """Append a job; before that store the rows of the oldest one and remove it, if there are MAX_FINISHED.

        cache: dropped if the tree may not hold decoded rows.
        """
        if len(self) == MAX_FINISHED:
            self.keep_oldest(served)
        tree = with_adapter(served, job.request.adapter).tree
        self.append((job, None if tree.decoded is False else cache))

    def keep_oldest(self, served: Served) -> None:
        """Remove the oldest job; store its decoded rows if the tree may hold such rows."""
        job, cache = self.popleft()
        keep(with_adapter(served, job.request.adapter), cache.tokens if cache else [], cache)

    def keep_for(self, served: Served, request: DecodeRequest) -> None:
        """Store the rows that a new prompt can reuse, because background work has not stored them yet.

        They must have the same adapter. A prompt of another conversation must share at least a chunk: all share the
        first tokens of the template.
        """
        prompt, adapter = request.prompt, request.adapter
        served = with_adapter(served, adapter)
        for job, cache in [found for found in self if found[0].request.adapter == adapter]:
            continues = prompt[: len(job.request.prompt)] == job.request.prompt
            if cache and (continues or shared(cache.tokens, prompt) >= served.tree.chunking.least):
                keep(served, prompt[:-1], cache)
