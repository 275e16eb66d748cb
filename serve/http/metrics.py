"""`/metrics` in Prometheus' text format: vLLM's names where they mean the same, kvtape's own for the rest."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtape.serve.counting import COUNTERS
from kvtape.serve.requests import End, Service

__all__ = ["GAUGES", "Metrics"]

GAUGES = {
    "vllm:num_requests_running": "requests that run",
    "vllm:num_requests_waiting": "requests that wait",
    "vllm:kv_cache_usage_perc": "resident tokens over those that fit, all slots, 0 to 1",
    "kvtape:resident_tokens": "tokens whose rows are in the engine, all slots",
    "kvtape:slots": "conversations kept at once",
}

_TIMES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
_FROM_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "tokens of prompts"),
    "vllm:generation_tokens": ("generated_tokens", "tokens generated"),
    "vllm:prefix_cache_queries": ("prompt_tokens", "tokens of prompts that were looked up"),
    "vllm:prefix_cache_hits": ("reused_tokens", "of them, tokens that were resident"),
}


class Metrics:
    """Counts and times of one server; its registry is its own, so that two servers in a process do not mix."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfService(service))
        self._model = service.model_name

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(self._model)

        def counter(name: str, what: str, label: str) -> Counter:
            return Counter(name, what, ["model_name", label], registry=self._registry)

        self._first = histogram("vllm:time_to_first_token_seconds", "from the request to its first text", _TIMES)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "from the request to its end", _TIMES)
        self._prompt = histogram("vllm:request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._said = histogram("vllm:request_generation_tokens", "tokens of an answer", _TOKENS)
        self._ended = counter(
            "vllm:request_success", "requests that ended; abort: the client left first", "finished_reason"
        )
        self._failed = counter("kvtape:failed_requests", "requests that were refused or failed", "code")

    def first_text(self, seconds: float) -> None:
        self._first.observe(seconds)

    def ended(self, end: End, seconds: float) -> None:
        self._whole.observe(seconds)
        self._prompt.observe(end.usage.prompt_tokens)
        self._said.observe(end.usage.completion_tokens)
        self._ended.labels(self._model, end.reason).inc()

    def abandoned(self) -> None:
        """A client left before the end of its answer."""
        self._ended.labels(self._model, "abort").inc()

    def failed(self, code: str) -> None:
        self._failed.labels(self._model, code).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _OfService(Collector):
    """What the service itself counts, read when somebody looks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        status = self._service.status()
        label = [self._service.model_name]
        used = status.resident_tokens / status.capacity_tokens if status.capacity_tokens else 0.0
        values = {
            "vllm:num_requests_running": status.running,
            "vllm:num_requests_waiting": status.waiting,
            "vllm:kv_cache_usage_perc": used,
            "kvtape:resident_tokens": status.resident_tokens,
            "kvtape:slots": status.slots,
        }
        for name, value in values.items():
            gauge = GaugeMetricFamily(name, GAUGES[name], labels=["model_name"])
            gauge.add_metric(label, value)
            yield gauge
        own = {f"kvtape:{name}": (name, what) for name, what in COUNTERS.items()}
        for name, (key, what) in (_FROM_COUNTERS | own).items():
            counter = CounterMetricFamily(name, what, labels=["model_name"])
            counter.add_metric(label, status.counters.get(key, 0))
            yield counter
