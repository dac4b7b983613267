"""Slow test files: workers start with them, and `make test-fast` leaves them out.

A worker that begins a long file last keeps the others waiting. Measured in seconds of CPU, the longest first; from
about four seconds on a file belongs here.
"""

from pathlib import Path

ROOT = Path(__file__).parent
# Every file in them starts a server, a browser or another program, or needs one that is running.
FOLDERS = ("clients", "cluster", "deploy", "docs", "server", "ui")
# The tests of each of them share one server.
SHARED_SERVERS = ("tests/clients/", "tests/server/middleware/", "tests/server/routes/")
FILES = (
    "kernels/test_jit.py",
    "cluster/test_cluster.py",
    "ui/test_page.py",
    "server/test_lifecycle.py",
    "engine/process/test_supervisor.py",
    "docs/test_snippets.py",
    "training/test_codec.py",
    "deploy/test_manifests.py",
    "deploy/test_package.py",
    "server/test_soak.py",
    "engine/test_core.py",
    "engine/test_faults.py",
    "engine/test_nano.py",
    "tools/test_verify.py",
    "kernels/test_paged_attention.py",
    "codec/test_fused.py",
    "engine/execution/test_fused.py",
    "checkpoint/test_memory.py",
    "deploy/test_triton.py",
    "server/test_schema.py",
    "test_quality.py",
    "tools/bench/test_sweep.py",
    "deploy/test_multi_model.py",
    "training/test_text_corpus.py",
    "training/test_dual_ar.py",
    "tools/bench/test_report.py",
    "codec/test_streaming.py",
    "cli/say/test_say.py",
    "engine/execution/test_text_weights.py",
    "engine/test_alignment.py",
    "server/test_reload.py",
    "server/test_sleep.py",
    "cli/say/test_server_speech.py",
    "server/test_choices.py",
    "engine/execution/test_fallback.py",
    "kernels/test_sample_token.py",
    "text/normalize/test_english.py",
    "text/test_markdown.py",
    "server/test_hostile.py",
    "tools/bench/test_quality.py",
    "server/routes/test_live.py",
    "server/test_nano.py",
    "kernels/test_linear.py",
    "server/routes/test_fish.py",
    "docs/test_examples.py",
    "engine/process/test_worker.py",
    "server/test_logging.py",
    "deploy/test_runpod.py",
    "cluster/test_end.py",
    "cluster/test_balancer.py",
    "batch/test_batch.py",
    "book/test_book.py",
    "checkpoint/test_quantized.py",
    "text/test_split.py",
    "tools/bench/test_load.py",
    "engine/test_request_tracker.py",
    "server/test_browser.py",
    "test_release.py",
    "engine/test_thread.py",
    "training/test_clips.py",
    "voices/test_store.py",
    "engine/execution/test_fused_quantized.py",
    "training/test_divergence.py",
    "server/test_settings.py",
    "engine/test_engine.py",
    "server/routes/test_openai.py",
    "cli/say/test_player.py",
    "checkpoint/test_load.py",
    "tools/bench/test_engine.py",
    "audio/test_encode.py",
    "audio/test_sandbox.py",
    "fuzz/test_fuzz.py",
    "engine/scheduling/test_scheduler.py",
    "checkpoint/test_inspect.py",
    "model/test_frame.py",
    "cli/test_doctor.py",
    "engine/test_kv_cache.py",
    "kernels/test_int4_linear.py",
    "server/middleware/test_connection_limit.py",
    "cli/test_models.py",
    "deploy/test_endpoint.py",
    "training/test_export.py",
)
_ORDER = {ROOT / name: number for number, name in enumerate(FILES)}


def order(path: Path) -> int:
    """Return the place of a file of tests in the order in which files are begun."""
    return _ORDER.get(path, len(FILES))


def is_slow(path: Path) -> bool:
    return path in _ORDER or path.relative_to(ROOT).parts[0] in FOLDERS


def scope(nodeid: str) -> str:
    """Return what stays on one worker together with a test: its file, or its folder if that shares a server."""
    return next((folder for folder in SHARED_SERVERS if nodeid.startswith(folder)), nodeid.partition("::")[0])
