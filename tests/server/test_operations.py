import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serving
from tests.waiting import wait_until

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "shoal.json"


def test_ready_reports_the_backend(http: httpx.Client) -> None:
    content = http.get("/ready").json()
    assert content["state"] == "ready"
    backend = content["backend"]
    assert backend in ("native", "eager")  # a machine without the library and a compiler has no native backend
    assert content["codec_backend"] == backend
    assert f'shoal_engine_backend{{backend="{backend}",part="codec"}} 1.0' in http.get("/metrics").text


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_probes_answer_head_like_get(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.headers["content-length"]) == (200, get.headers["content-length"])


def figures(http: httpx.Client) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_count_requests_and_audio(http: httpx.Client) -> None:
    before = figures(http)
    http.post("/v1/tts", json={"text": "Hello.", "max_new_tokens": 5, "seed": 5})
    http.post("/v1/tts", json={"text": "Hello.", "reference_id": "nobody"})
    after = figures(http)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more('shoal_requests_total{api="fish",outcome="completed"}') == 1
    assert more('shoal_errors_total{kind="voice_not_found"}') == 1
    assert more('shoal_time_to_first_audio_seconds_count{api="fish"}') == 1
    assert more('shoal_http_responses_total{route="/v1/tts",status="404"}') == 1
    assert more("shoal_frames_total") == 5
    assert after["shoal_engine_slots"] == 8
    assert after["shoal_requests_in_flight"] == 0
    assert after["shoal_engine_resident_bytes"] > after["process_resident_memory_bytes"] > 20 << 20


def test_every_log_line_is_json_with_the_request_id(server: Serving, http: httpx.Client) -> None:
    body = {"text": "Hello.", "max_new_tokens": 2, "seed": 5}
    http.post("/v1/tts", json=body, headers={"x-request-id": "find-me"})

    def mine() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("request_id") == "find-me"]

    wait_until(lambda: len(mine()) == 2)  # the last line is written after the last byte was sent
    assert [line["logger"] for line in mine()] == ["shoal.api.accounting", "shoal.server.middleware.request_id"]
    assert mine()[1]["status"] == 200
    assert mine()[0]["audio_seconds"] == 0.08


def test_the_openapi_document_has_every_route_with_examples(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/tts", "/v1/audio/speech", "/invocations", "/v1/references/add", "/ready"} <= paths.keys()
    content = paths["/v1/tts"]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "application/msgpack", "multipart/form-data"}
    assert "streamed" in content["application/json"]["examples"]


def test_the_dashboard_queries_only_existing_metrics(http: httpx.Client) -> None:
    http.post("/v1/tts", json={"text": "Hello.", "max_new_tokens": 2})
    text = http.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\w+)", text, re.M)) | set(re.findall(r"^(shoal_\w+)", text, re.M))
    queries = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])
    ]
    asked = {name for query in queries for name in re.findall(r"shoal_\w+", query)}
    assert asked - known <= {
        "shoal_gpu_memory_used_bytes",
        "shoal_gpu_memory_total_bytes",
        "shoal_gpu_memory_allocated_bytes",
    }
    assert len(asked) > 12


def test_unknown_paths_are_logged_but_are_no_metric_labels(server: Serving, http: httpx.Client) -> None:
    http.get("/nowhere/at/all" + "l" * 1000)
    wait_until(lambda: "GET /nowhere/at/all" in server.log.read_text())
    assert "l" * 200 not in server.log.read_text()
    assert "nowhere" not in http.get("/metrics").text
