"""Log forwarding: records of the engine process are sent to the parent process and handled there.

There they get the parent's format and level, and records about a job its request id, which only the parent knows.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from logging.handlers import QueueHandler
from queue import SimpleQueue

from shoal.engine.process.messages import LogLine

current_job: ContextVar[int] = ContextVar("shoal_job", default=0)


class ForwardingHandler(QueueHandler):
    """Passes records to `send` instead of a queue. An error in `send` does not reach the code that logs."""

    def __init__(self, send: Callable[[int, LogLine], None]) -> None:
        super().__init__(SimpleQueue())
        self._send = send

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        traceback = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
        self._send(job_of(record), LogLine(record.name, record.levelno, record.getMessage(), traceback))


def forward_logs(send: Callable[[int, LogLine], None], level: int) -> None:
    """Send all records of this process through `send`: Shoal's from `level` on, other loggers' from WARNING on.

    Replaces the root handlers, so it is for the engine process only.
    """
    logging.basicConfig(handlers=[ForwardingHandler(send)], level=logging.WARNING, force=True)
    logging.getLogger("shoal").setLevel(level)
    logging.captureWarnings(True)


def job_of(record: logging.LogRecord) -> int:
    """Return the job a record is about, 0 for none.

    The engine thread serves many utterances, so its records carry the job as an extra; elsewhere the context has it.
    """
    return int(getattr(record, "job", current_job.get()))


def write_line(line: LogLine) -> None:
    """Pass a forwarded line to the handlers of this process."""
    logger = logging.getLogger(line.logger)
    if logger.isEnabledFor(line.level):
        parts = {"name": line.logger, "levelno": line.level, "levelname": logging.getLevelName(line.level)}
        logger.handle(logging.makeLogRecord({**parts, "msg": line.message, "exc_text": line.traceback}))
