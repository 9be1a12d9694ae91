"""A run that fails for the user's mistake says so in one line, without Prefect's tracebacks."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from jetspec.errors import JetspecError


class _NoUserMistakes(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Drop records of a JetspecError: the command prints it once, at the end."""
        error = record.exc_info[1] if record.exc_info else None
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, JetspecError):
                return False
            seen = seen.__cause__ or seen.__context__
        return "JetspecError" not in record.getMessage()


@contextlib.contextmanager
def one_line_failures(*, to_stderr: bool) -> Iterator[None]:
    """Filter Prefect's console while the body runs.

    Args:
        to_stderr: send what the body prints to stderr, so that stdout is for the result alone.
    """
    # Filters of a logger outlive Prefect's set-up of its handlers, which comes later.
    loggers = [logging.getLogger(f"prefect.{kind}") for kind in ("flow_runs", "task_runs")]
    quiet = _NoUserMistakes()
    for logger in loggers:
        logger.addFilter(quiet)
    try:
        with contextlib.redirect_stdout(sys.stderr) if to_stderr else contextlib.nullcontext():
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(quiet)
