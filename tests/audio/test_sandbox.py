"""The decoder process: what it may use, and what happens when it dies."""

import logging
import os
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from shoal.audio.decode import AudioLimits, decode_container, read_audio
from shoal.audio.encode import encode_file
from shoal.audio.mp4 import check_index
from shoal.audio.sandbox import pool as pool_module
from shoal.audio.sandbox.messages import OK, READY, DecodeRequest, DecodeResponse
from shoal.audio.sandbox.pool import DecoderPool, DecoderProcess
from shoal.errors import AudioError, EngineStopped
from tests.server.standin import wait_until

RATE = 16_000
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="resource limits are tested on Linux")


@pytest.fixture(scope="module")
def flac() -> bytes:
    return encode_file(np.sin(np.arange(RATE) / 20).astype(np.float32) / 4, "flac", RATE)


@pytest.fixture
def decoders():
    pool = DecoderPool(1)
    yield pool
    pool.close()


def request_for(data: bytes, **changes: float) -> DecodeRequest:
    fields = {"max_bytes": 1 << 20, "min_seconds": 0.1, "max_seconds": 90.0, "max_channels": 2}
    fields |= {"min_rate": 8_000, "max_rate": 192_000, "size": len(data)} | changes
    return DecodeRequest(RATE, **fields)


def only(pool: DecoderPool) -> DecoderProcess:
    (worker,) = pool._idle
    return worker


def test_the_sandbox_returns_what_ffmpeg_decodes(decoders, flac):
    samples, rate, channels = decoders.decode(flac, request_for(flac))
    assert np.array_equal(samples, decode_container(flac, RATE, AudioLimits()).samples)
    assert (rate, channels, samples.flags.writeable) == (RATE, 1, True)


def test_a_process_is_reused_until_it_has_done_its_share(decoders, flac, monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_JOBS", 2)
    decoders.decode(flac, request_for(flac))
    first = only(decoders)
    with pytest.raises(AudioError, match="not a known audio format"):
        decoders.decode(bytes(100), request_for(bytes(100)))
    assert decoders._idle == []
    assert not first.alive


@linux_only
def test_a_process_that_died_between_recordings_is_replaced(decoders, flac):
    decoders.decode(flac, request_for(flac))
    os.kill(only(decoders)._process.pid, signal.SIGKILL)
    only(decoders)._process.wait()
    assert len(decoders.decode(flac, request_for(flac))[0]) == RATE


@linux_only
def test_a_process_that_dies_while_it_decodes_is_an_error_of_the_recording(decoders, flac, caplog):
    decoders.decode(flac, request_for(flac))
    worker, errors = only(decoders), []

    def decode() -> None:
        try:
            decoders.decode(flac, request_for(flac))
        except AudioError as error:
            errors.append(str(error))

    os.kill(worker._process.pid, signal.SIGSTOP)
    thread = threading.Thread(target=decode)
    thread.start()
    wait_until(lambda: worker.jobs == 2)
    os.kill(worker._process.pid, signal.SIGSEGV)
    os.kill(worker._process.pid, signal.SIGCONT)
    thread.join(240)
    assert errors == ["the recording makes the decoder fail; send it in another format, such as wav"]
    assert "exit code -11" in caplog.text
    assert len(decoders.decode(flac, request_for(flac))[0]) == RATE


@linux_only
def test_a_recording_that_takes_too_long_ends_its_process(decoders, flac, monkeypatch):
    decoders.decode(flac, request_for(flac))
    os.kill(only(decoders)._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(pool_module, "JOB_SECONDS", 0.1)
    with pytest.raises(AudioError, match="takes too long"):
        decoders.decode(flac, request_for(flac))


def test_a_response_that_is_too_long_is_not_read(decoders, flac, monkeypatch):
    """A worker that was taken over cannot fill the parent's memory."""
    answer = READY + DecodeResponse(OK, RATE, 1, 1 << 40).pack()
    script = f"import sys; sys.stdout.buffer.write({answer!r}); sys.stdout.flush(); sys.stdin.buffer.read()"
    monkeypatch.setattr(pool_module, "COMMAND", script)
    with pytest.raises(AudioError, match="makes the decoder fail"):
        decoders.decode(flac, request_for(flac))


def test_a_process_that_does_not_start_is_reported(monkeypatch):
    monkeypatch.setattr(pool_module, "COMMAND", "raise SystemExit(3)")
    with pytest.raises(EngineStopped, match="did not start \\(exit code 3\\)"):
        DecoderProcess()


@linux_only
def test_the_process_has_no_secrets_and_exits_with_its_parent(flac, monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEYS", "secret")
    script = f"""
import os, signal
from shoal.audio.decode import read_audio
from shoal.audio.sandbox.pool import POOL
read_audio({flac!r}, 16000)
process = POOL._idle[0]._process
print(process.pid, b"secret" in open(f"/proc/{{process.pid}}/environ", "rb").read(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    pid, knows = finished.stdout.split()
    assert knows == "False"
    wait_until(lambda: not _runs(int(pid)))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().split()[2] != "Z"
    except OSError:
        return False


@linux_only
def test_the_limits_of_the_process(tmp_path):
    """No file, no socket, no memory beyond the recording's; loops end by a signal."""
    script = f"""
import os, resource, signal, socket
from shoal.audio.sandbox.messages import DecodeRequest
from shoal.audio.sandbox.worker import address_space_bytes, give_up_privileges, limit_job
os.closerange(3, 100)
baseline = address_space_bytes()
give_up_privileges()
limit_job(DecodeRequest(16000, 1, 0.0, 90.0, 2, 8000, 192000, 1000), baseline)
for forbidden in (lambda: open("/etc/passwd"), lambda: open({str(tmp_path / "new")!r}, "w"), socket.socket):
    try:
        forbidden()
    except OSError:
        print("refused", flush=True)
try:
    bytearray(400 << 20)
except MemoryError:
    print("refused", flush=True)
resource.setrlimit(resource.RLIMIT_CPU, (1, -1))
while True:
    pass
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.stdout.split() == ["refused"] * 4, finished.stderr
    assert finished.returncode == -signal.SIGXCPU


@linux_only
def test_the_process_can_neither_delete_nor_signal_nor_execute(tmp_path):
    """What resource limits permit: none of these opens a file, and root may fork in spite of them."""
    (tmp_path / "kept").touch()
    script = f"""
import os, resource, signal, sys
from shoal.audio.sandbox.seccomp import restrict_system_calls
assert restrict_system_calls()
for forbidden in (
    lambda: os.unlink({str(tmp_path / "kept")!r}),
    lambda: os.kill(os.getppid(), 0),
    lambda: os.execv("/bin/true", ["true"]),
    lambda: os.fork() or os._exit(1),
    lambda: os.listdir("/"),
    lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
):
    try:
        forbidden()
    except PermissionError:
        os.write(1, b"refused ")
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.write(1, b"allowed")
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.stdout.split() == [*["refused"] * 6, "allowed"], finished.stderr
    assert (tmp_path / "kept").exists()


@linux_only
def test_a_process_without_the_filter_decodes_with_a_warning(decoders, flac, monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "READY", pool_module.READY_UNFILTERED)
    monkeypatch.setattr(pool_module, "READY_UNFILTERED", READY)
    pool_module.warn_unfiltered.cache_clear()
    caplog.set_level(logging.WARNING)
    assert decoders.decode(flac, request_for(flac))[1] == RATE
    assert "without a system call filter" in caplog.text


def test_a_program_without_an_interpreter_decodes_with_a_warning(flac, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/opt/tritonserver/stub")
    caplog.set_level(logging.WARNING)
    assert read_audio(flac, RATE).seconds == 1.0
    assert "decoded without resource limits" in caplog.text


@pytest.fixture(scope="module")
def mp4(recorded) -> bytes:
    samples = np.sin(np.arange(44_100) / 20).astype(np.float32)[np.newaxis] / 4
    return recorded(samples, 44_100, "mp4", "aac", "fltp")


def patched(mp4: bytes, box: bytes, offset: int, *numbers: int) -> bytes:
    """Replace 32-bit numbers at an offset within the body of the first box of this name."""
    at = mp4.index(box) + 4 + offset
    return mp4[:at] + struct.pack(f">{len(numbers)}I", *numbers) + mp4[at + 4 * len(numbers) :]


@pytest.mark.parametrize(("box", "offset", "numbers"), [(b"stsz", 4, (1, 30_000_000)), (b"stts", 4, (1, 30_000_000))])
def test_an_mp4_that_declares_millions_of_packets_is_refused(mp4, box, offset, numbers):
    assert read_audio(mp4, RATE).seconds == pytest.approx(1.0, abs=0.1)
    bomb = patched(mp4, box, offset, *numbers)
    with pytest.raises(AudioError, match="declares 30,000,000 packets; at most 301,000 are allowed"):
        read_audio(bomb, RATE)


def box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), name) + body


def test_the_packets_of_all_fragments_are_counted():
    fragment = box(b"moof", box(b"traf", box(b"trun", struct.pack(">II", 0, 60))))
    check_index(fragment * 2, 120)
    with pytest.raises(AudioError, match="declares 180 packets; at most 120"):
        check_index(fragment * 3, 120)


def test_pcm_in_a_mov_file_may_have_one_sample_per_tick(recorded):
    samples = np.rint(np.sin(np.arange(44_100) / 20) * 9000).astype(np.int16)[np.newaxis]
    mov = recorded(samples, 44_100, "mov", "pcm_s16le", "s16")
    assert read_audio(mov, 44_100).seconds == 1.0
    with pytest.raises(AudioError, match="declares 44,100 packets"):
        check_index(patched(mov, b"stts", 12, 2), 1_000)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff" * 100, box(b"moov", b"\0\0\0\1stbl" + b"\1" * 40)])
def test_other_data_has_no_index(data):
    check_index(data, 1)


def test_a_compressed_header_is_refused():
    with pytest.raises(AudioError, match="compressed header"):
        check_index(box(b"moov", box(b"cmov", b"")), 10)
