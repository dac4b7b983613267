"""The log of the engine process: its lines go to whoever started it, and are written there like the lines of that one.

So they have its format and its level, and those about a job the id of the request, which is known only there.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar

from shoal.engine.process.messages import LogLine

current_job: ContextVar[int] = ContextVar("shoal_job", default=0)


class ForwardingHandler(logging.Handler):
    def __init__(self, send: Callable[[int, LogLine], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            traceback = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
            line = LogLine(record.name, record.levelno, record.getMessage(), traceback)
            self._send(job_of(record), line)
        except Exception:  # noqa: BLE001 - as all handlers: a line that cannot be written must not fail what it tells of
            self.handleError(record)


def forward_logs(send: Callable[[int, LogLine], None], level: int) -> None:
    """For the engine's own process only. `level` is that of Shoal's lines; of others, warnings are enough."""
    logging.basicConfig(handlers=[ForwardingHandler(send)], level=logging.WARNING, force=True)
    logging.getLogger("shoal").setLevel(level)
    logging.captureWarnings(True)


def job_of(record: logging.LogRecord) -> int:
    """The job a line is about; 0 if it is about none.

    Several utterances are spoken by one thread: a line about one of them says so, and its number is that of its job.
    """
    return int(getattr(record, "job", current_job.get()))


def write_line(line: LogLine) -> None:
    """On the other side: to the handlers there."""
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        parts = {"name": line.logger, "levelno": line.level, "levelname": logging.getLevelName(line.level)}
        logger.handle(logging.makeLogRecord({**parts, "msg": line.message, "exc_text": line.traceback}))
