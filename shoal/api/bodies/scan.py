"""Scan MessagePack and JSON bodies for depth, element count and duplicate keys, before a parser creates objects.

A parser makes up to 72 bytes of Python objects from one byte of input (empty lists), and holds the GIL meanwhile. The
scanners take linear time, stop at the first limit, and keep the keys of the open objects only.
"""

import json
import re
from collections.abc import Iterator

MAX_ELEMENTS = 10_000
MAX_KEYS = 1_000  # validation creates one error per unknown key
MAX_DEPTH = 32
MAX_ESCAPES = 1_000_000  # a parser holds the GIL while it resolves them; some clients escape every / of base64
QUOTE = ord('"')

# Code -> bytes that follow a value of fixed size; the codes of short strings contain their length.
_FIXED = dict.fromkeys((*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)), 0)
_FIXED |= {code: code & 31 for code in range(0xA0, 0xC0)}
_FIXED |= {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
# Code -> bytes of the length field of strings, binary data and extensions.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = (0xC7, 0xC8, 0xC9)  # one byte for the type, not counted in the length
# Code -> bytes of the length field of lists and maps; the codes of short ones contain their length.
_LISTS = dict.fromkeys(range(0x90, 0xA0), 0) | {0xDC: 2, 0xDD: 4}
_MAPS = dict.fromkeys(range(0x80, 0x90), 0) | {0xDE: 2, 0xDF: 4}

_JSON_STRUCTURE = re.compile(rb'["\[\]{},]')
_JSON_SPACE = re.compile(rb"[ \t\r\n]*+")
_JSON_CHARACTERS = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # rest of a string, with whole escapes
PIECE_BYTES = 64 << 10  # a regular expression holds the GIL for one piece


class BodyRejected(ValueError):
    """The body exceeds a limit, or parsers could read it in different ways."""


class _ElementCount:
    def __init__(self, max_elements: int) -> None:
        self._max_elements, self._elements, self._keys = max_elements, 0, 0

    def add(self, elements: int) -> None:
        self._elements += elements
        if self._elements > self._max_elements:
            raise BodyRejected(f"it has more than {self._max_elements:,} elements")

    def add_key(self, key: bytes, siblings: set[bytes]) -> None:
        self._keys += 1
        if self._keys > MAX_KEYS:
            raise BodyRejected(f"it has more than {MAX_KEYS:,} keys")
        if key in siblings:
            raise BodyRejected(f"the key {key[:64].decode(errors='replace')!r} occurs twice in one object")
        siblings.add(key)


def scan_msgpack(body: bytes, max_elements: int = MAX_ELEMENTS) -> None:
    """Raise BodyRejected for too many values or keys, deep nesting, duplicate keys, and bytes after the first value."""
    scan = _MsgpackScan(body, max_elements)
    scan.value(0)
    if scan.position > len(body):  # inside of the last item of a list
        raise BodyRejected("it is truncated")
    if scan.position < len(body):
        raise BodyRejected(f"{len(body) - scan.position:,} bytes follow the end of its value")


class _MsgpackScan:
    def __init__(self, body: bytes, max_elements: int) -> None:
        self.position = 0
        self._body, self._count = body, _ElementCount(max_elements)
        self._count.add(1)

    def value(self, depth: int) -> None:
        """Move past one value. Raises BodyRejected."""
        code = self._code()
        if code in _FIXED:
            self._move(1 + _FIXED[code])
        elif code in _SIZED:
            self._move(self._length(_SIZED[code]) + (code in _EXTENSIONS))
        elif depth == MAX_DEPTH:
            raise BodyRejected(f"it is nested deeper than {MAX_DEPTH} levels")
        elif code in _LISTS:
            self._list(self._length(_LISTS[code]), depth + 1)
        elif code in _MAPS:
            self._map(self._length(_MAPS[code]), depth + 1)
        else:
            raise BodyRejected(f"byte {self.position:,} ({code:#x}) begins no value")

    def _list(self, items: int, depth: int) -> None:
        self._count.add(items)
        body, fixed = self._body, _FIXED
        for _ in range(items):
            following = fixed.get(body[self.position]) if self.position < len(body) else None
            if following is None:
                self.value(depth)
            else:
                # If the body ends inside this value, the next one or `scan_msgpack` detects it.
                self.position += 1 + following

    def _map(self, entries: int, depth: int) -> None:
        self._count.add(2 * entries)
        keys = set[bytes]()
        for _ in range(entries):
            start = self.position
            self.value(depth)
            self._count.add_key(_key_text(self._body[start : self.position]), keys)
            self.value(depth)

    def _code(self) -> int:
        if self.position >= len(self._body):
            raise BodyRejected("it is truncated")
        return self._body[self.position]

    def _length(self, size: int) -> int:
        """Move past the code and the length field of `size` bytes, and return the length."""
        code, start = self._code(), self.position + 1
        self._move(1 + size)
        if size:
            return int.from_bytes(self._body[start : self.position])
        return code & 15  # only lists and maps have their length in the code here

    def _move(self, size: int) -> None:
        self.position += size
        if self.position > len(self._body):
            raise BodyRejected("it is truncated")


def _key_text(packed: bytes) -> bytes:
    """Return the text of a packed string, which has several encodings; other keys as they are."""
    code = packed[0]
    if 0xA0 <= code < 0xC0:
        return packed[1:]
    return packed[1 + _SIZED[code] :] if 0xD9 <= code <= 0xDB else packed


def scan_json(body: bytes, max_elements: int = MAX_ELEMENTS) -> None:
    """Raise BodyRejected for too many values or keys, deep nesting and duplicate keys. The parser finds other errors.

    Strings, keys, lists, objects and commas count as elements, which is at most twice the number of values and keys.
    """
    if body.count(b"\\") > MAX_ESCAPES:
        raise BodyRejected(f"it has more than {MAX_ESCAPES:,} escapes")
    count, open = _ElementCount(max_elements), list[set[bytes]]()
    for start, end in _json_tokens(body):
        character = body[start]
        if character in b"]}":
            if not open:
                return  # malformed
            open.pop()
            continue
        count.add(1)
        if character in b"[{":
            open.append(set())
            if len(open) > MAX_DEPTH:
                raise BodyRejected(f"it is nested deeper than {MAX_DEPTH} levels")
        elif character in b'"' and open and _is_key(body, end):
            count.add_key(_json_key(body[start:end]), open[-1])


def _is_key(body: bytes, end: int) -> bool:
    colon = _match_end(_JSON_SPACE, body, end)
    return body[colon : colon + 1] == b":"


def _json_tokens(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of strings and structural characters."""
    position = 0
    while position < len(body):
        found = _JSON_STRUCTURE.search(body, position, position + PIECE_BYTES)
        if found is None:
            position += PIECE_BYTES
            continue
        start, position = found.span()
        if body[start] == QUOTE:
            position = _string_end(body, position)
        yield start, position


def _string_end(body: bytes, start: int) -> int:
    """Return the position after the closing quote, or the end of the body. `start` follows the opening quote."""
    quote = body.find(b'"', start)
    if quote < 0:
        return len(body)
    if body.find(b"\\", start, quote) < 0:
        return quote + 1  # recordings in base64 have no escapes
    end = _match_end(_JSON_CHARACTERS, body, start)
    return end + 1 if body[end : end + 1] == b'"' else len(body)


def _match_end(pattern: re.Pattern[bytes], body: bytes, start: int) -> int:
    """Return the end of a match of a repeated pattern at `start`, which is matched piece by piece."""
    position = start
    while found := pattern.match(body, position, position + PIECE_BYTES):
        # A piece may end inside an escape, which the next piece then matches.
        if found.end() == position or found.end() < position + PIECE_BYTES - 1:
            return found.end()
        position = found.end()
    return position


def _json_key(quoted: bytes) -> bytes:
    """Return the text of a key with its escapes resolved: "te\\u0078t" is the same key as "text"."""
    if b"\\" not in quoted:
        return quoted[1:-1]
    try:
        text: str = json.loads(quoted)
    except ValueError:
        return quoted  # malformed
    return text.encode(errors="surrogatepass")
