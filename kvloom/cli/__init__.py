"""The command line: ``kvloom COMMAND``. Data goes to stdout, remarks and progress to stderr.

Whatever is heavy is imported inside a command, so that help and wrong use are answered at once.
"""

from kvloom.cli.app import app, main

__all__ = ["app", "main"]
