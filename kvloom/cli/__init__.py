"""The command line: ``kvloom COMMAND``. Data goes to stdout, remarks and progress to stderr.

Whatever is heavy is imported inside a command, so that help and wrong use are answered at once.
"""

from __future__ import annotations

import sys
from typing import NoReturn


def main(args: list[str] | None = None) -> NoReturn:
    """The command line; the process ends with its exit code."""
    try:
        from kvloom.cli.app import run

        run(args)
    except KeyboardInterrupt:  # while Python still imports; what comes later is caught where more is known
        sys.stderr.write("kvloom: interrupted\n")
        sys.exit(130)
