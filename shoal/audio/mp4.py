"""Bounds on the index of an mp4 or mov file, checked before ffmpeg builds it.

A few bytes can declare any number of samples, and ffmpeg allocates an entry for each.
"""

import struct
from collections.abc import Iterator

import numpy as np

from shoal.errors import AudioError

PARENTS = frozenset((b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"))
MAX_BOXES, MAX_NESTING = 200_000, 8


def check_index(data: bytes, max_entries: int) -> None:
    """Raise AudioError when a track, or all fragments together, declare more than `max_entries` samples.

    Other formats have no such boxes and pass.
    """
    fragments = 0
    for number, (name, body) in enumerate(_boxes(memoryview(data), MAX_NESTING)):
        if number == MAX_BOXES:
            raise AudioError(f"the recording has more than {MAX_BOXES:,} boxes")
        if name == b"cmov":
            raise AudioError("the recording has a compressed header, which is not supported")
        if name == b"trun":
            fragments += _number(body, 4)
        entries = max(fragments, _entries(name, body))
        if entries > max_entries:
            raise AudioError(f"the recording declares {entries:,} packets; at most {max_entries:,} are allowed")


def _boxes(view: memoryview, nesting: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (name, body) of each box, parents first; the sample table of a PCM track (`_is_pcm`) is skipped."""
    at = 0
    while at + 8 <= len(view):
        size, name = struct.unpack_from(">I4s", view, at)
        header = 8
        if size == 1 and at + 16 <= len(view):
            (size,), header = struct.unpack_from(">Q", view, at + 8), 16
        end = len(view) if size < header else min(at + size, len(view))
        body = view[at + header : end]
        if name == b"stbl" and _is_pcm(body):
            name = b"    "  # not in PARENTS, so it is not descended into
        yield name, body
        if name in PARENTS and nesting:
            yield from _boxes(body, nesting - 1)
        at = end


def _is_pcm(table: memoryview) -> bool:
    """Return whether each sample lasts one tick: ffmpeg then indexes chunks, which the file has to list one by one."""
    durations = [(_number(body, 4), _number(body, 12)) for name, body in _boxes(table, 0) if name == b"stts"]
    return durations == [(1, 1)]


def _entries(name: bytes, body: memoryview) -> int:
    """Return the samples that a box of a sample table declares."""
    if name in (b"stsz", b"stz2"):
        return _number(body, 8)
    if name in (b"stts", b"ctts"):
        pairs = min(_number(body, 4), max(0, len(body) - 8) // 8)
        return int(np.frombuffer(body[8 : 8 + 8 * pairs], ">u4")[::2].sum(dtype=np.int64))
    return 0


def _number(body: memoryview, at: int) -> int:
    """Return the 32-bit number at an offset; 0 beyond the end."""
    return int.from_bytes(body[at : at + 4]) if at + 4 <= len(body) else 0
