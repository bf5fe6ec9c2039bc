"""Count what the server did, for `GET /metrics`, with names that dashboards of other engines know."""

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from .engine import Engine
from .job import End

disable_created_metrics()  # of each counter a second figure, the time when it began
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of answers, and gauges of what the engine holds now."""

    def __init__(self, engine: Engine):
        self.engine, registry = engine, CollectorRegistry()
        self._registry = registry
        self.requests = Counter("mlx_mtp:requests", "Requests, by how they ended.", ["reason"], registry=registry)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter("prompt_tokens_cached", "Tokens of prompts that were not read again.")
        self._made = self._counter("generation_tokens", "Tokens of answers.")
        self._cycles = self._counter("spec_decode_num_drafts", "Cycles that verified tokens.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafts that were verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts that were right.")
        self._depths = Counter(
            "mlx_mtp:spec_decode_num_accepted_tokens_per_pos",
            "Drafts of the heads that were right, by depth.",
            ["position"],
            registry=registry,
        )
        self._seconds = self._counter("generation_seconds", "Seconds of decoding.")
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its last token.")
        self._gauge("num_requests_running", "Requests that are answered.", lambda: len(engine.running))
        self._gauge("num_requests_waiting", "Requests that wait.", lambda: engine.waiting)
        self._gauge("prefix_cache_bytes", "Bytes of remembered beginnings.", lambda: self._tree("nbytes"))
        self._gauge("prefix_cache_chunks", "Chunks of remembered beginnings.", lambda: self._tree("chunks"))
        self._gauge("memory_bytes", "Bytes that MLX holds.", lambda: mx.get_active_memory())

    def answered(self, end: End, prompt: int, seconds: float) -> None:
        """Count one answer."""
        stats = end.stats
        self.requests.labels(end.reason).inc()
        for counter, value in (
            (self._prompt, prompt),
            (self._cached, end.cached),
            (self._made, stats.generation_tokens),
            (self._cycles, stats.cycles),
            (self._drafted, sum(stats.drafted) + stats.lookup_drafted),
            (self._accepted, sum(stats.accepted) + stats.lookup_accepted),
            (self._seconds, stats.decode_time),
        ):
            counter.inc(value)
        for depth, accepted in enumerate(stats.accepted):
            self._depths.labels(str(depth)).inc(accepted)
        self._first.observe(end.first_token)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """Write all figures in Prometheus' format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(f"mlx_mtp:{name}", words, registry=self._registry)

    def _histogram(self, name: str, words: str) -> Histogram:
        return Histogram(f"mlx_mtp:{name}", words, buckets=SECONDS, registry=self._registry)

    def _gauge(self, name: str, words: str, value) -> None:
        Gauge(f"mlx_mtp:{name}", words, registry=self._registry).set_function(value)

    def _tree(self, name: str) -> int:
        served = self.engine.served
        return getattr(served.tree, name) if served else 0
