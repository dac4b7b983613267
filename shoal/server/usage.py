"""What keys have had of their daily audio, in a small file, so that a restart does not give it to them again.

Written every few seconds and at the end: a server that is killed forgets those seconds, no more.
"""

import asyncio
import json
import logging
from pathlib import Path

from shoal.api.admission import Meters, Spent
from shoal.errors import ShoalError
from shoal.paths import atomic_write, output_errors

logger = logging.getLogger(__name__)

SAVE_SECONDS = 2.0


class UsageFile:
    """The file of one server; two servers that share it would overwrite each other's counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Spent]:
        """Nothing if there is no file. One that is broken is told in the log and counts as none."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(name): Spent(str(each["day"]), float(each["seconds"])) for name, each in stored["keys"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            logger.warning("%s is not a file of usage, counting from zero: %s", self.path, problem)
            return {}

    def write(self, spent: dict[str, Spent]) -> None:
        """Raises OutputError."""
        keys = {name: {"day": each.day, "seconds": round(each.seconds, 3)} for name, each in spent.items()}
        with output_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path, (json.dumps({"keys": keys}, indent=2) + "\n").encode(), private=True)


class UsageKeeper:
    """Carries counts between the meters and the file."""

    def __init__(self, meters: Meters, file: UsageFile) -> None:
        self._meters, self._file = meters, file
        meters.restore(file.read())
        self._saved = meters.spent()

    async def keep(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """What has changed, if anything. A disk that refuses is told in the log; requests go on."""
        spent = self._meters.spent()
        if spent == self._saved:
            return
        try:
            await asyncio.to_thread(self._file.write, spent)
            self._saved = spent
        except ShoalError as problem:
            logger.warning("%s", problem)
