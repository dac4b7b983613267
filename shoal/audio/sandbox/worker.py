"""Child process that decodes recordings, one after the other, from its standard input to its standard output.

Before the first recording it permanently gives up files, sockets and child processes, and on Linux every system call
that decoding does not need. Address space and CPU time are limited per recording. Systems without `resource` (Windows)
have no limits, but faults stay in this process.
"""

import os
import select
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shoal.audio.decode import AudioLimits, DecodedAudio, decode_container
from shoal.audio.sandbox.messages import (
    AUDIO_ERROR,
    MAX_ERROR_BYTES,
    MISSING_EXTRA,
    OK,
    READY,
    READY_UNFILTERED,
    DecodeRequest,
    DecodeResponse,
)
from shoal.audio.sandbox.seccomp import restrict_system_calls
from shoal.audio.wav import wav_header
from shoal.errors import AudioError, MissingExtra

if sys.platform != "win32":
    import resource

IDLE_SECONDS = 60.0  # without a request, after which the process exits
MEMORY_BYTES = 192 << 20  # in addition to copies of the recording and its samples
COPIES_OF_RECORDING, COPIES_OF_SAMPLES = 3, 6
CPU_SECONDS, CPU_SECONDS_PER_SECOND = 5, 0.1  # per second of the longest recording allowed
STANDARD_FILES = 3


def main() -> None:
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    warm_up()
    baseline = address_space_bytes()
    filtered = give_up_privileges()
    responses.write(READY if filtered else READY_UNFILTERED)
    responses.flush()
    while _arrives(requests) and (request := DecodeRequest.read(requests)) is not None:
        limit_job(request, baseline)
        serve(request, requests, responses)


def serve(request: DecodeRequest, requests: BinaryIO, responses: BinaryIO) -> None:
    """Read one recording and write its samples, or the error."""
    try:
        audio = _decode(request, requests)
        samples = memoryview(audio.samples.data).cast("B")
        response = DecodeResponse(OK, audio.original_rate, audio.original_channels, len(samples))
    except AudioError as error:
        response, samples = _error(AUDIO_ERROR, str(error))
    except MissingExtra as error:
        response, samples = _error(MISSING_EXTRA, str(error))
    except MemoryError:
        response, samples = _error(AUDIO_ERROR, "decoding the recording needs more memory than allowed")
    responses.write(response.pack())
    responses.write(samples)
    responses.flush()


def _decode(request: DecodeRequest, requests: BinaryIO) -> DecodedAudio:
    data = requests.read(request.size)
    fields = request.max_bytes, request.min_seconds, request.max_seconds, request.max_channels
    return decode_container(data, request.sample_rate, AudioLimits(*fields, request.min_rate, request.max_rate))


def _error(status: int, message: str) -> tuple[DecodeResponse, memoryview]:
    text = message.encode()[:MAX_ERROR_BYTES]
    return DecodeResponse(status, size=len(text)), memoryview(text)


def _arrives(requests: BinaryIO) -> bool:
    """Wait for a request; return False after IDLE_SECONDS, so that an idle server keeps no decoder process."""
    if os.name == "nt":
        return True
    return bool(select.select([requests], [], [], IDLE_SECONDS)[0])


def warm_up() -> None:
    """Decode, resample and fail once, to import every module now: later no file can be opened."""
    samples = struct.pack("<800h", *range(800))
    wav = wav_header(8_000, len(samples)) + samples
    with suppress(AudioError, MissingExtra):
        decode_container(wav, 16_000, AudioLimits(min_seconds=0.0))
    with suppress(AudioError, MissingExtra):
        decode_container(bytes(64), 16_000, AudioLimits())


def give_up_privileges() -> bool:
    """Limit this process, irrevocably: no new files, sockets or processes, no file growth, no core dump.

    Return whether system calls are filtered, too.
    """
    if sys.platform == "win32":
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_FILES, STANDARD_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return restrict_system_calls()


def limit_job(request: DecodeRequest, baseline: int | None) -> None:
    """Limit memory and CPU time of one recording. `baseline` is the address space of the idle process, if known."""
    if sys.platform == "win32":
        return
    if baseline is not None:
        copies = COPIES_OF_RECORDING * request.size + COPIES_OF_SAMPLES * 4 * request.max_samples()
        _limit(resource.RLIMIT_AS, baseline + MEMORY_BYTES + copies)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = CPU_SECONDS + CPU_SECONDS_PER_SECOND * request.max_seconds
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + allowed) + 1)


def _limit(kind: int, value: int) -> None:
    """Set the soft limit, within the hard one of the environment."""
    assert sys.platform != "win32"
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def address_space_bytes() -> int | None:
    """Return the size of this process's address space; None where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
