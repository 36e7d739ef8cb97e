"""What the user sees and the shell gets when a command does not succeed: one sentence, and 1, 2, 130 or 141.

2 is wrong use, which another command line would mend; 1 is a failure of model, store or machine, and a check
that did not pass.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

from kvloom.errors import DocumentError, EvalError, KVLoomError, MethodError, PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILURE, WRONG_USE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141

# Depending on its version, Typer carries its own copy of click or uses the installed one: right for both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def failures() -> Iterator[None]:
    """Inside, any exception but Typer's own ends the process with its sentence and exit code.

    Only with ``KVLOOM_TRACEBACK`` set is a traceback shown.
    """
    try:
        yield
        sys.stdout.flush()  # here, where a reader that is gone is expected
    except (typer.Exit, typer.Abort, UsageError):
        raise
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    except (MethodError, PromptError, DocumentError, EvalError) as error:
        fail(f"error: {error}", WRONG_USE)
    except (KVLoomError, OSError) as error:
        fail(f"error: {error}", FAILURE)
    except Exception as error:
        fail(
            f"error: unexpected {type(error).__name__}: {error}; "
            "this is a bug in kvloom: set KVLOOM_TRACEBACK=1 to see where, and report it",
            FAILURE,
        )


def fail(sentence: str, code: int) -> NoReturn:
    """The process ends with `code`, after ``kvloom: sentence`` on stderr."""
    if os.environ.get("KVLOOM_TRACEBACK") and sys.exc_info()[0] is not None:
        import traceback

        typer.echo(traceback.format_exc(), err=True)
    typer.echo(f"kvloom: {' '.join(sentence.split())}", err=True)
    sys.exit(code)


def fail_usage(error: Exception) -> NoReturn:
    """The process ends with 2, after the sentence of Typer's usage error and where to read more."""
    context = error.ctx  # type: ignore[attr-defined]
    command = "kvloom" if context is None else context.command_path
    sentence = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    fail(f"error: {sentence[:1].lower()}{sentence[1:]} (see {command} --help)", WRONG_USE)
