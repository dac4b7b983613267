from scripts.metrics_table import PAGE, updated
from shoal.metrics import Metrics


def test_gpu_memory_is_exported_only_when_the_engine_reports_it() -> None:
    statistics: dict[str, object] = {"vram": {"used": 3 << 30, "all": 141 << 30, "allocated": 2 << 30}}
    sample = Metrics(lambda: statistics).registry.get_sample_value
    assert sample("shoal_gpu_memory_used_bytes") == 3 << 30
    assert sample("shoal_gpu_memory_total_bytes") == 141 << 30
    assert sample("shoal_gpu_memory_allocated_bytes") == 2 << 30
    assert sample("shoal_engine_resident_bytes") is None
    statistics.clear()
    assert sample("shoal_gpu_memory_used_bytes") is None


def test_the_backends_in_use_are_labels() -> None:
    backends = {"model": "graph", "codec": "plain-graph"}
    sample = Metrics(lambda: {"backends": backends}).registry.get_sample_value
    assert sample("shoal_engine_backend", {"part": "model", "backend": "graph"}) == 1
    backends["model"] = "eager"
    assert sample("shoal_engine_backend", {"part": "model", "backend": "graph"}) is None
    assert sample("shoal_engine_backend", {"part": "model", "backend": "eager"}) == 1
    assert sample("shoal_engine_backend", {"part": "codec", "backend": "plain-graph"}) == 1


def test_the_metrics_table_in_the_docs_is_generated_from_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run `python -m scripts.metrics_table`"
