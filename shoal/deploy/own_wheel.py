"""Build a wheel from the running package, so that archives contain the code that they were tested with.

Works for installed and for editable packages: metadata comes from the installed distribution, files from the package's
directory. The same files give the same bytes.
"""

import base64
import hashlib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path

from shoal import __version__
from shoal.errors import CheckpointError

DISTRIBUTION = "shoal-tts"
PACKAGE = Path(__file__).parents[1]
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE")
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that zip can store


def build_own_wheel() -> tuple[str, bytes]:
    """Return file name and content of the wheel. Raises CheckpointError if the package is not installed."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise CheckpointError(
            f"{DISTRIBUTION} is not installed, so its wheel cannot be packaged: run `pip install --editable .` first"
        ) from None
    return wheel_name(installed), _archive(dict(sorted({**_package_files(), **_metadata(installed)}.items())))


def wheel_name(installed: Distribution) -> str:
    tag = Parser().parsestr(installed.read_text("WHEEL") or "")["Tag"] or "py3-none-any"
    return f"{DISTRIBUTION.replace('-', '_')}-{installed.version}-{tag}.whl"


def requirement(extra: str) -> str:
    """Return a requirements file that installs the wheel beside it: pip resolves `.` from the file's directory."""
    return f"--find-links .\n{DISTRIBUTION}[{extra}]=={__version__}\n"


def _package_files() -> dict[str, bytes]:
    return {f"shoal/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in _sources()}


def _sources() -> Iterator[Path]:
    for path in PACKAGE.rglob("*"):
        if path.is_file() and not any(
            part.startswith((".", "__pycache__")) for part in path.relative_to(PACKAGE).parts
        ):
            yield path


def _metadata(installed: Distribution) -> dict[str, bytes]:
    directory = f"{DISTRIBUTION.replace('-', '_')}-{installed.version}.dist-info"
    found = {name: text for name in METADATA if (text := installed.read_text(name)) is not None}
    return {f"{directory}/{name}": text.encode() for name, text in found.items()} | {f"{directory}/RECORD": b""}


def _archive(content: dict[str, bytes]) -> bytes:
    record = next(name for name in content if name.endswith("/RECORD"))
    content[record] = "".join(_record_line(name, data, record) for name, data in content.items()).encode()
    written = BytesIO()
    # Uncompressed: weights hardly compress, and the archive is compressed as a whole.
    with zipfile.ZipFile(written, "w") as wheel:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, data)
    return written.getvalue()


def _record_line(name: str, data: bytes, record: str) -> str:
    if name == record:
        return f"{name},,\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"
