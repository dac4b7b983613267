"""Every counter, gauge and histogram, named once.

What the server measures itself are instruments; what the engine counts is read from `statistics()` when somebody asks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# A second series per counter that says when it began is more than anybody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of `statistics()`, found by its path."""

    name: str
    kind: Literal["gauge", "counter"]
    path: tuple[str, ...]
    help: str


ENGINE_FIGURES = (
    Figure("shoal_engine_live", "gauge", ("live",), "Requests the engine has taken and not ended."),
    Figure("shoal_engine_running", "gauge", ("running",), "Slots in use."),
    Figure("shoal_engine_waiting", "gauge", ("waiting",), "Requests in the engine's queue."),
    Figure("shoal_engine_slots", "gauge", ("slots",), "Slots there are."),
    Figure("shoal_kv_blocks", "gauge", ("blocks", "all"), "Blocks of KV memory."),
    Figure("shoal_kv_blocks_used", "gauge", ("blocks", "used"), "Blocks that sequences hold."),
    Figure("shoal_kv_blocks_cached", "gauge", ("blocks", "cached"), "Free blocks whose content is still known."),
    Figure("shoal_prefix_hits", "counter", ("prefix_cache", "hits"), "Prompts that found a block of theirs."),
    Figure("shoal_prefix_tokens_saved", "counter", ("prefix_cache", "tokens_saved"), "Columns not computed again."),
    Figure("shoal_prefix_evictions", "counter", ("prefix_cache", "evictions"), "Known blocks that had to go."),
    Figure("shoal_prefix_host_hits", "counter", ("prefix_cache", "host_hits"), "Blocks brought back from the host."),
    Figure("shoal_sequences_admitted", "counter", ("scheduler", "admitted"), "Sequences given a slot."),
    Figure("shoal_sequences_preempted", "counter", ("scheduler", "preempted"), "Sequences set back for memory."),
    Figure("shoal_sequences_cancelled", "counter", ("scheduler", "cancelled"), "Sequences cancelled."),
    Figure("shoal_frames", "counter", ("speech", "frames"), "Frames drawn."),
    Figure("shoal_utterances_spoken", "counter", ("speech", "spoken"), "Utterances that ended well."),
    Figure("shoal_guard_retries", "counter", ("speech", "retried"), "Utterances the audio guard sent back."),
    Figure("shoal_utterances_failed", "counter", ("speech", "failed"), "Utterances that ended in an error."),
    Figure("shoal_steps", "counter", ("steps", "steps"), "Steps of the engine."),
    Figure("shoal_steps_failed", "counter", ("steps", "failed"), "Steps the device refused."),
    Figure("shoal_steps_out_of_memory", "counter", ("steps", "out_of_memory"), "Steps memory did not suffice for."),
    Figure("shoal_step_seconds", "counter", ("steps", "seconds"), "Time in steps, without the codec."),
    Figure("shoal_codec_seconds", "counter", ("codec_seconds",), "Time spent decoding frames to samples."),
    Figure("shoal_voice_cache_entries", "gauge", ("voices", "entries"), "Voices in memory."),
    Figure("shoal_voice_cache_hits", "counter", ("voices", "hits"), "Voices found in memory."),
    Figure("shoal_voice_cache_misses", "counter", ("voices", "misses"), "Voices that had to be made."),
    Figure("shoal_vram_bytes", "gauge", ("vram", "used"), "Device memory in use, by anybody."),
    Figure("shoal_vram_bytes_all", "gauge", ("vram", "all"), "Device memory there is."),
    Figure("shoal_vram_bytes_allocated", "gauge", ("vram", "allocated"), "Device memory in the engine's tensors."),
    Figure("shoal_engine_resident_bytes", "gauge", ("host", "resident"), "Host memory of the engine's process."),
    Figure("shoal_engine_restarts", "counter", ("restarts",), "Times the engine's process was started again."),
)


class Metrics:
    """The server's instruments, in a registry of their own."""

    def __init__(self, statistics: Callable[[], Mapping[str, Any] | None]) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "shoal_http_responses", "Answers by route and status.", ("route", "status"), registry=self.registry
        )
        self.response_seconds = Histogram(
            "shoal_http_seconds", "Request in to last byte out.", ("route",), buckets=SECONDS, registry=self.registry
        )
        self.speeches = Counter(
            "shoal_speeches", "Speeches by API and how they ended.", ("api", "outcome"), registry=self.registry
        )
        self.first_audio = Histogram(
            "shoal_first_audio_seconds", "Request in to first audio.", ("api",), buckets=SECONDS, registry=self.registry
        )
        self.speech_seconds = Histogram(
            "shoal_speech_seconds", "Request in to last audio made.", ("api",), buckets=SECONDS, registry=self.registry
        )
        self.real_time_factor = Histogram(
            "shoal_real_time_factor", "Seconds of work per second of audio.", buckets=RATIOS, registry=self.registry
        )
        self.audio_seconds = Counter(
            "shoal_audio_seconds", "Audio made, by the name of the key.", ("key",), registry=self.registry
        )
        self.errors = Counter("shoal_errors", "Errors by kind.", ("kind",), registry=self.registry)
        self.encoding_seconds = Counter(
            "shoal_encoding_seconds", "Time in audio encoders.", ("format",), registry=self.registry
        )
        self.under_way = Gauge(
            "shoal_speeches_under_way", "Speeches between request and last byte.", registry=self.registry
        )
        self.ready = Gauge("shoal_ready", "1 while requests are taken.", registry=self.registry)
        self.loop_lag = Gauge("shoal_event_loop_lag_seconds", "How late the event loop is.", registry=self.registry)
        self.registry.register(EngineCollector(statistics))
        # The server's own memory, file handles and CPU time, under the names every dashboard knows.
        ProcessCollector(registry=self.registry)


class EngineCollector(Collector):
    """Figures that an engine does not have are left out."""

    def __init__(self, statistics: Callable[[], Mapping[str, Any] | None]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        statistics = self._statistics()
        for figure in ENGINE_FIGURES if statistics else ():
            value = _at(statistics, figure.path)
            if isinstance(value, int | float):
                family = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
                yield family(figure.name, figure.help, value=value)


def _at(statistics: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(statistics, Mapping) or name not in statistics:
            return None
        statistics = statistics[name]
    return statistics
