"""Exit of a command without the interpreter's teardown."""


class QuickExit(SystemExit):
    """Raised by a command that has no thread, child process or open file left, so the process may end at once."""
