"""Where the package's messages go: to the logger ``blockscale``, and to stderr where ``BLOCKSCALE_LOG`` names a level."""

from __future__ import annotations

import logging
import os

__all__ = ["LEVELS", "log_to_stderr"]

LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr() -> None:
    """Print messages from the level in ``BLOCKSCALE_LOG`` on; without it the application's logging decides.

    A level that does not exist is named in a warning and changes nothing: a log is no reason to fail.
    """
    level = os.environ.get("BLOCKSCALE_LOG")
    if not level:
        return
    logger = logging.getLogger("blockscale")
    if level not in LEVELS:
        logger.warning("blockscale: expected `BLOCKSCALE_LOG` to be one of %s, got %s", ", ".join(LEVELS), level)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # else an application that prints its own log would print these twice
