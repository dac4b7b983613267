"""End of a command that has closed everything it opened."""


class QuickExit(SystemExit):
    """Raised by a command with no thread, child process or open file left: the process may end without a teardown."""
