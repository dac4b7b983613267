"""Prometheus metrics: all counters, gauges and histograms of the server and of the engine.

The server updates its own instruments. The engine's metrics are read from its `statistics()` at every scrape.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Do not export a second series with the creation time of every counter.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)

Statistics = Callable[[], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One number of the engine's `statistics()`, found by its path."""

    name: str
    kind: Literal["gauge", "counter"]
    path: tuple[str, ...]
    help: str


def _gauge(name: str, path: str, help: str) -> EngineMetric:
    return EngineMetric(name, "gauge", tuple(path.split(".")), help)


def _counter(name: str, path: str, help: str) -> EngineMetric:
    return EngineMetric(name, "counter", tuple(path.split(".")), help)


ENGINE_METRICS = (
    _gauge("shoal_engine_active_requests", "live", "Requests that the engine has accepted and not finished."),
    _gauge("shoal_engine_running", "running", "Sequences that hold a slot of the running batch."),
    _gauge("shoal_engine_waiting", "waiting", "Sequences that wait for a slot."),
    _gauge("shoal_engine_slots", "slots", "Slots of the running batch, the maximum number of running sequences."),
    _gauge("shoal_kv_blocks", "blocks.all", "KV cache blocks in total."),
    _gauge("shoal_kv_blocks_used", "blocks.used", "KV cache blocks that running sequences hold."),
    _gauge("shoal_kv_blocks_cached", "blocks.cached", "Free KV cache blocks whose content a later prompt can reuse."),
    _counter("shoal_prefix_lookups", "prefix_cache.lookups", "Prompts looked up in the prefix cache."),
    _gauge(
        "shoal_prefix_hit_ratio", "prefix_cache.hit_ratio", "Share of prompt lookups that reused a KV block, 0 to 1."
    ),
    _counter("shoal_prefix_hits", "prefix_cache.hits", "Prompts that reused at least one cached KV block."),
    _counter("shoal_prefix_tokens_saved", "prefix_cache.tokens_saved", "Prompt tokens reused from the prefix cache."),
    _counter("shoal_prefix_evictions", "prefix_cache.evictions", "Cached KV blocks evicted to make space."),
    _counter("shoal_prefix_host_hits", "prefix_cache.host_hits", "KV blocks restored from the host-memory tier."),
    _counter("shoal_sequences_admitted", "scheduler.admitted", "Sequences admitted to a slot of the running batch."),
    _counter(
        "shoal_sequences_preempted",
        "scheduler.preempted",
        "Sequences preempted because the KV cache was full; recomputed later.",
    ),
    _counter("shoal_sequences_cancelled", "scheduler.cancelled", "Sequences cancelled before they finished."),
    _counter("shoal_frames", "speech.frames", "Audio frames generated."),
    _counter("shoal_utterances_completed", "speech.completed", "Utterances generated to their end."),
    _counter(
        "shoal_guard_retries", "speech.retried", "Utterances and turns regenerated after the guard rejected them."
    ),
    _counter("shoal_utterances_failed", "speech.failed", "Utterances that ended with an error."),
    _counter(
        "shoal_steps",
        "steps.steps",
        "Engine steps. Each computes one frame of every running sequence, or prompts only.",
    ),
    _counter("shoal_steps_failed", "steps.failed", "Engine steps that failed with a device error."),
    _counter("shoal_steps_out_of_memory", "steps.out_of_memory", "Engine steps that ran out of GPU memory."),
    _counter("shoal_step_seconds", "steps.seconds", "Seconds spent in engine steps, excluding codec decoding."),
    _counter("shoal_codec_seconds", "codec_seconds", "Seconds spent decoding frames to samples."),
    _gauge(
        "shoal_engine_dropped_sizes",
        "dropped_sizes",
        "Batch and prompt sizes that the backends no longer use because they failed; other sizes replace them.",
    ),
    _gauge("shoal_voice_cache_entries", "voices.entries", "Encoded voices in memory."),
    _counter("shoal_voice_cache_hits", "voices.hits", "Voice lookups answered from memory."),
    _counter("shoal_voice_cache_misses", "voices.misses", "Voice lookups that loaded or encoded the voice."),
    _gauge("shoal_gpu_memory_used_bytes", "vram.used", "GPU memory in use by all processes."),
    _gauge("shoal_gpu_memory_total_bytes", "vram.all", "Total GPU memory."),
    _gauge("shoal_gpu_memory_allocated_bytes", "vram.allocated", "GPU memory allocated by the engine's tensors."),
    _gauge("shoal_engine_resident_bytes", "host.resident", "Resident host memory of the engine process."),
    _counter("shoal_engine_restarts", "restarts", "Restarts of the engine process after a failure."),
    _gauge(
        "shoal_engine_asleep",
        "asleep",
        "1 while no engine process runs because the server was idle (`sleep_seconds`), else 0.",
    ),
    _counter(
        "shoal_engine_wakes",
        "wakes",
        "Engine processes started by a request after `sleep_seconds` ended the previous one.",
    ),
)


# Exported once for each part of the engine, with the backend as a label and the value 1.
BACKEND_METRIC = EngineMetric(
    "shoal_engine_backend",
    "gauge",
    ("backends",),
    "1 for the backend in use, by part (model, codec) and backend (graph, fused, plain-graph, native, eager).",
)


class Metrics:
    """The server's instruments and the engine's collector, in their own registry."""

    def __init__(self, statistics: Statistics) -> None:
        self.registry = CollectorRegistry()
        self._add_http()
        self._add_requests()
        self.ready = Gauge("shoal_ready", "1 while the server accepts requests, else 0.", registry=self.registry)
        self.loop_lag = Gauge(
            "shoal_event_loop_lag_seconds",
            "Seconds by which the event loop wakes a sleeping task too late.",
            registry=self.registry,
        )
        self.registry.register(EngineCollector(statistics))
        # The standard process_* metrics: memory, file descriptors and CPU time of the server process.
        ProcessCollector(registry=self.registry)

    def _add_http(self) -> None:
        self.responses = Counter(
            "shoal_http_responses", "HTTP responses by route and status.", ("route", "status"), registry=self.registry
        )
        self.response_seconds = Histogram(
            "shoal_http_request_duration_seconds",
            "Seconds from an HTTP request to the last byte of its response, by route.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )

    def _add_requests(self) -> None:
        registry = self.registry
        self.in_flight = Gauge(
            "shoal_requests_in_flight", "Admitted requests that have not finished generating.", registry=registry
        )
        self.requests = Counter(
            "shoal_requests",
            "Finished requests by API and outcome: completed, disconnected, interrupted, shutdown, or an error code.",
            ("api", "outcome"),
            registry=registry,
        )
        self.time_to_first_audio = Histogram(
            "shoal_time_to_first_audio_seconds",
            "Seconds from admission of a request to its first audio, by API.",
            ("api",),
            buckets=SECONDS,
            registry=registry,
        )
        self.generation_seconds = Histogram(
            "shoal_generation_duration_seconds",
            "Seconds from admission of a request to its last generated audio, by API.",
            ("api",),
            buckets=SECONDS,
            registry=registry,
        )
        self.real_time_factor = Histogram(
            "shoal_real_time_factor",
            "Generation time of a request divided by the duration of its audio.",
            buckets=RATIOS,
            registry=registry,
        )
        self.audio_seconds = Counter(
            "shoal_audio_seconds", "Seconds of audio generated, by name of the API key.", ("key",), registry=registry
        )
        self.errors = Counter(
            "shoal_errors",
            "Failed requests by error code; requests that a shutdown ended are `shutdown`.",
            ("kind",),
            registry=registry,
        )
        self.encoding_seconds = Counter(
            "shoal_encoding_seconds", "Seconds spent in audio encoders, by format.", ("format",), registry=registry
        )


class EngineCollector(Collector):
    """Exports the engine's statistics; metrics that the engine does not report are omitted."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        statistics = self._statistics()
        for metric in ENGINE_METRICS if statistics else ():
            value = _at(statistics, metric.path)
            if isinstance(value, int | float):
                family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
                yield family(metric.name, metric.help, value=value)
        backends = _at(statistics, BACKEND_METRIC.path)
        if isinstance(backends, Mapping):
            gauge = GaugeMetricFamily(BACKEND_METRIC.name, BACKEND_METRIC.help, labels=("part", "backend"))
            for part, backend in backends.items():
                gauge.add_metric((part, backend), 1)
            yield gauge


def _at(statistics: Any, path: tuple[str, ...]) -> Any:
    """Return the value at `path`, or None if there is none."""
    for name in path:
        if not isinstance(statistics, Mapping) or name not in statistics:
            return None
        statistics = statistics[name]
    return statistics
