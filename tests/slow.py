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
    "clients/test_elevenlabs.py",  # and the other files of its folder, which share its server
    "server/routes/test_live.py",  # and the other files of its folder, which share its server
    "ui/test_spoken_words.py",
    "ui/test_refusals.py",
    "server/test_lifecycle.py",
    "training/test_codec.py",
    "test_quality.py",
    "deploy/test_triton.py",
    "engine/test_nano.py",
    "tools/test_verify.py",
    "engine/test_faults.py",
    "deploy/test_package.py",
    "tools/bench/test_sweep.py",
    "server/test_schema.py",
    "cli/say/test_say.py",
    "codec/test_streaming.py",
    "deploy/test_manifests.py",
    "engine/test_core.py",
    "engine/process/test_supervisor.py",
    "server/test_soak.py",
    "docs/test_snippets.py",
    "tools/bench/test_report.py",
    "tools/bench/test_emulated_bursts.py",
    "training/test_text_corpus.py",
    "checkpoint/test_memory.py",
    "docs/test_examples.py",
    "cluster/test_balancer.py",
    "checkpoint/test_inspect.py",
    "test_imports.py",
    "text/normalize/test_english.py",
    "training/test_dual_ar.py",
    "training/test_divergence.py",
    "server/test_choices.py",
    "deploy/test_multi_model.py",
    "deploy/test_runpod.py",
    "server/test_reload.py",
    "server/test_logging.py",
    "book/test_book.py",
    "server/test_nano.py",
    "tools/bench/test_quality.py",
    "tools/bench/test_load.py",
    "test_release.py",
    "checkpoint/test_quantized.py",
    "deploy/test_endpoint.py",
    "engine/scheduling/test_scheduler.py",
    "training/test_clips.py",
    "voices/test_store.py",
    "batch/test_batch.py",
    "fuzz/test_fuzz.py",
    "server/test_browser.py",
    "engine/execution/test_fused_quantized.py",
    "engine/execution/test_fused.py",
    "engine/test_native_engine.py",
    "cli/test_doctor.py",
    "server/test_sleep.py",
    "engine/test_alignment.py",
    "cli/test_models.py",
    "tools/bench/test_profile.py",
    "server/middleware/test_connection_limit.py",
    "server/test_settings.py",
    "engine/execution/test_fallback.py",
    "training/test_export.py",
    "engine/test_thread.py",
    "audio/test_encode.py",
    "text/test_split.py",
    "audio/test_decode.py",
    "engine/test_kv_cache.py",
    "codec/test_fused.py",
    "kernels/attention/test_paged_attention.py",
    "cluster/test_end.py",
    "model/test_frame.py",
    "engine/process/test_worker.py",
    "cli/say/test_server_speech.py",
    "cli/say/test_player.py",
    "kernels/sampling/test_sample_token.py",
    "checkpoint/test_load.py",
    "kernels/linear/test_int4_linear.py",
    "kernels/linear/test_linear.py",
    "engine/test_engine.py",
    "audio/test_sandbox.py",
    "engine/test_request_tracker.py",
)
_ORDER = {ROOT / name: number for number, name in enumerate(FILES)}


def order(path: Path) -> int:
    """Return the place of a file of tests in the order in which files are begun."""
    return _ORDER.get(path, len(FILES) + (not is_slow(path)))


def is_slow(path: Path) -> bool:
    return path in _ORDER or path.relative_to(ROOT).parts[0] in FOLDERS


def scope(nodeid: str) -> str:
    """Return what stays on one worker together with a test: its file, or its folder if that shares a server."""
    return next((folder for folder in SHARED_SERVERS if nodeid.startswith(folder)), nodeid.partition("::")[0])
