"""Log formatting: one line per event, as JSON or as text, each with the id of its request."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from shoal.server.middleware.request_id import current_id

LogFormat = Literal["auto", "json", "text"]
EXTRAS = ("api", "key", "audio_seconds", "method", "route", "status", "seconds")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current_id.get():
            line["request_id"] = current_id.get()
        line |= {name: getattr(record, name) for name in EXTRAS if hasattr(record, name)}
        if record.exc_text:  # records from the engine process carry a formatted traceback
            line["traceback"] = record.exc_text
        elif record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        id = current_id.get()
        return super().format(record) + (f" [{id}]" if id else "")


def set_up_logging(format: LogFormat, level: str) -> None:
    """Configure the root logger of a server process; `auto` is text on a terminal. Library code must not call it."""
    handler = logging.StreamHandler(sys.stderr)
    as_text = sys.stderr.isatty() if format == "auto" else format == "text"
    handler.setFormatter(TextLines() if as_text else JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("shoal").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # any client can cause its warnings
