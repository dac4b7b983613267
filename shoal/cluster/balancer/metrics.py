"""Prometheus metrics of the balancer: its HTTP requests, and health and requests of every worker."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.cluster.balancer.workers import Worker
from shoal.metrics import Metrics

Value = Callable[[Worker], int]

GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("shoal_worker_healthy", "1 while requests are sent to the worker, else 0.", lambda worker: int(worker.healthy)),
    ("shoal_worker_in_flight", "Requests at the worker that have not ended.", lambda worker: worker.in_flight),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("shoal_worker_requests", "Requests sent to the worker.", lambda worker: worker.counts["requests"]),
    (
        "shoal_worker_retries",
        "Refusals that sent a request to another worker.",
        lambda worker: worker.counts["retried"],
    ),
    ("shoal_worker_failures", "Lost connections and answers of 500 or more.", lambda worker: worker.counts["failed"]),
)


class WorkerCollector(Collector):
    """Exports the numbers that `/v1/workers` reports, labelled by worker and URL."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        labels = ("worker", "url")
        for name, help, value in GAUGES:
            yield self._filled(GaugeMetricFamily(name, help, labels=labels), value)
        for name, help, value in COUNTERS:
            yield self._filled(CounterMetricFamily(name, help, labels=labels), value)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Metric:
        for worker in self._workers:
            family.add_metric((worker.name, worker.address.url), value(worker))
        return family


def balancer_metrics(workers: Sequence[Worker]) -> Metrics:
    """Return the server's instruments with those of the workers; there is no engine in this process."""
    metrics = Metrics(dict)
    metrics.ready.set_function(lambda: any(worker.healthy for worker in workers))
    metrics.in_flight.set_function(lambda: sum(worker.in_flight for worker in workers))
    metrics.registry.register(WorkerCollector(workers))
    return metrics
