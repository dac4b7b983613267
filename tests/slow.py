"""Slow test files: workers start with them, and `make test-fast` leaves them out.

A worker that begins a long file last keeps the others waiting. Measured in seconds of CPU, the longest first; from
about four seconds on a file belongs here.
"""

from pathlib import Path

ROOT = Path(__file__).parent
# Every file in them starts a server, a browser or another program, or needs one that is running.
FOLDERS = ("clients", "cluster", "deploy", "docs", "server", "ui")
# The tests of each of them share one server: a worker that begins one of its files runs all of them.
SHARED_SERVERS = ("tests/clients/", "tests/server/middleware/", "tests/server/routes/")
FILES = (
    "cluster/test_cluster.py",
    "kernels/test_jit.py",
    "ui/test_page.py",
    "clients/test_elevenlabs.py",  # and with it the other clients
    "deploy/test_runpod.py",
    "server/test_lifecycle.py",
    "engine/test_faults.py",
    "server/routes/test_live.py",  # and with it the other routes
    "text/normalize/test_english.py",
    "training/test_codec.py",
    "tools/test_verify.py",
    "engine/process/test_supervisor.py",
    "test_quality.py",
    "engine/test_nano.py",
    "deploy/test_triton.py",
    "docs/test_snippets.py",
    "server/test_schema.py",
    "cli/say/test_say.py",
    "tools/bench/test_sweep.py",
    "codec/test_streaming.py",
    "deploy/test_manifests.py",
    "engine/test_core.py",
    "engine/execution/test_fused.py",
    "engine/execution/test_fallback.py",
    "server/test_soak.py",
    "training/test_text_corpus.py",
    "codec/test_fused.py",
    "docs/test_examples.py",
    "deploy/test_package.py",
    "book/test_book.py",
    "tools/bench/test_report.py",
    "text/test_markdown.py",
    "kernels/test_paged_attention.py",
    "checkpoint/test_memory.py",
    "server/test_choices.py",
    "kernels/test_sample_token.py",
    "server/test_reload.py",
    "batch/test_batch.py",
    "deploy/test_multi_model.py",
    "training/test_dual_ar.py",
    "server/test_logging.py",
    "tools/bench/test_quality.py",
    "server/test_nano.py",
    "checkpoint/test_quantized.py",
    "kernels/test_linear.py",
    "text/test_split.py",
    "server/test_sleep.py",
    "cluster/test_end.py",
    "cluster/test_balancer.py",
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
    "engine/process/test_worker.py",
    "cli/say/test_server_speech.py",
    "engine/test_alignment.py",
    "server/test_hostile.py",
    "server/routes/test_fish.py",
    "engine/execution/test_text_weights.py",
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
