"""Collect the metrics of the server for `GET /metrics`, under the names that dashboards of other servers use."""

from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from ..tuning.kernel_fallback import failed_kernels
from .engine import Engine
from .job import DecodeRequest, End, Served
from .models import Models

disable_created_metrics()  # no second figure per counter with its start time
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
COUNTERS = {
    "prompt_tokens": ("Tokens of prompts.", lambda end, prompt: prompt),
    "prompt_tokens_cached": ("Tokens of prompts from the prefix cache.", lambda end, _: end.cached),
    "generation_tokens": ("Generated tokens.", lambda end, _: end.stats.generation_tokens),
    "spec_decode_num_drafts": ("Cycles that verified tokens.", lambda end, _: end.stats.cycles),
    "spec_decode_num_draft_tokens": ("Drafts that were verified.", lambda end, _: end.drafts[0]),
    "spec_decode_num_accepted_tokens": ("Drafts that were accepted.", lambda end, _: end.drafts[1]),
    "grammar_num_draft_tokens": ("Verified drafts of grammars.", lambda end, _: end.stats.grammar_drafted),
    "grammar_num_accepted_tokens": ("Accepted drafts of grammars.", lambda end, _: end.stats.grammar_accepted),
    "grammar_mask_seconds": ("Seconds in which the host made masks of grammars.", lambda end, _: end.stats.mask_time),
    "spec_decode_num_trees": ("Cycles that verified a draft tree.", lambda end, _: end.stats.trees),
    "spec_decode_num_tree_tokens": ("Verified drafts of trees.", lambda end, _: end.stats.tree_drafted),
    "spec_decode_num_accepted_tree_tokens": ("Accepted drafts of trees.", lambda end, _: end.stats.tree_accepted),
    "generation_seconds": ("Seconds of decoding.", lambda end, _: end.stats.decode_time),
}


class Metrics:
    """Counters and histograms of answered choices, a count of failed requests, and gauges of the current state.

    engine: of one model, or the `Models` of several.
    """

    def __init__(self, engine: Engine | Models):
        self.engine, self._registry = engine, CollectorRegistry()
        self.requests = self._made(Counter, "requests", "Requests, by the reason of their end.", ["reason"])
        self._counters = [(self._made(Counter, name, words), count) for name, (words, count) in COUNTERS.items()]
        depths = "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts of the heads, by depth."
        self._depths = self._made(Counter, *depths, ["position"])
        first = "time_to_first_token_seconds", "From a request to its first token."
        whole = "e2e_request_latency_seconds", "From a request to its last token."
        tool = "time_to_first_token_after_tool_result_seconds", "From a tool result to the first token."
        self._first, self._whole, self._after_tool = (
            self._made(Histogram, *each, buckets=SECONDS) for each in (first, whole, tool)
        )
        for name, words, value in (
            ("num_requests_running", "Active requests.", lambda: len(engine.running)),
            ("num_requests_waiting", "Queued requests.", lambda: engine.queued),
            ("prefix_cache_bytes", "Bytes of the prefix cache.", lambda: self._tree("nbytes")),
            ("prefix_cache_chunks", "Chunks in the prefix cache.", lambda: self._tree("chunks")),
            ("prefix_cache_buffers", "Buffers of the prefix cache.", lambda: self._tree("buffers")),
            ("buffers", "Buffers of weights, prefix cache and active requests (estimate).", self._buffers),
            ("memory_bytes", "Bytes that MLX has allocated.", mx.get_active_memory),
        ):
            self._made(Gauge, name, words).set_function(value)
        self._loads = self._made(Gauge, "model_loads", "Completed loads, by model.", ["model"])
        self._is_loaded = self._made(Gauge, "model_loaded", "1 for a loaded model, 0 for another one.", ["model"])
        failed = "kernels_failed", "Row counts at which a Metal kernel is off, as it does not compile or run."
        self._failed = self._made(Gauge, *failed, ["kernel", "reason"])

    def answered(self, end: End, request: DecodeRequest, seconds: float) -> None:
        """Count one finished choice, not one that failed. seconds: from the request to its last token."""
        self.requests.labels(end.reason).inc()
        for counter, count in self._counters:
            counter.inc(count(end, len(request.prompt)))
        for depth, accepted in enumerate(end.stats.accepted):
            self._depths.labels(str(depth)).inc(accepted)
        self._first.observe(end.first_token)
        if request.after_tool:
            self._after_tool.observe(end.first_token)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for _, served in self._loaded:
            for kernel, rows, reason in failed_kernels(served.model):
                self._failed.labels(kernel, reason).set(len(rows))
        if isinstance(self.engine, Models):
            for name, slot in [*self.engine.slots.items()]:
                self._loads.labels(name).set(slot.loads)
                self._is_loaded.labels(name).set(int(slot.ready is not None))
        return generate_latest(self._registry)

    @property
    def _loaded(self) -> list[tuple[Engine, Served]]:
        """The engines of the loaded models, each with its model."""
        engines = self.engine.engines if isinstance(self.engine, Models) else [self.engine]
        return [(engine, served) for engine in engines if (served := engine.served)]

    def _buffers(self) -> int:
        """Estimate the number of Metal buffers of weights, recordings, prefix caches and active requests' caches.

        0 while no model is loaded.
        """
        return self._tree("buffers") + sum(
            served.buffers.weights + served.buffers.recordings + len(engine.running) * served.buffers.caches
            for engine, served in self._loaded
        )

    def _made(self, kind: Any, name: str, *words: Any, **more: Any) -> Any:
        return kind(f"mlx_mtp:{name}", *words, registry=self._registry, **more)

    def _tree(self, name: str) -> int:
        return sum(getattr(served.tree, name) for _, served in self._loaded)
