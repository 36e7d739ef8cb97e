"""Runs ``kvloom`` command lines in processes of their own, forked from one that has imported everything.

Importing torch and transformers takes seconds, a fork milliseconds; all else is as for a user: own file
descriptors, environment, signals and exit code. Reads one JSON request a line: ``{"start": {...}}`` answers
with the process id, ``{"wait": pid}`` with its exit code (negative for a signal).
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import signal
import sys
import time
import warnings
from typing import Any

from kvloom import cli

for module in (
    "kvloom.loom",
    "kvloom.verify",
    "kvloom.demo",
    "kvloom.documents",
    "kvloom.retrieve",
    "pydantic",
):
    importlib.import_module(module)
for module in (
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    "rich.progress",
    "rich.table",
):
    importlib.import_module(module)


def full_disk(_: int) -> None:
    """Stands in for fsync."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def slow_disk(_: int) -> None:
    """Stands in for fsync."""
    time.sleep(0.05)


def read_only(*_: Any) -> None:
    """Stands in for the function that writes a file; root writes whatever the permissions say."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def bug(*_: Any, **__: Any) -> None:
    """Stands in for a function of ours."""
    raise ZeroDivisionError("a bug")


def run(request: dict[str, Any]) -> None:
    """The child: never returns."""
    descriptors = [os.open(request["stdin"], os.O_RDONLY)]
    descriptors += [
        os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_NOCTTY) for name in ("stdout", "stderr")
    ]
    for descriptor, number in zip(descriptors, range(3), strict=True):
        os.dup2(descriptor, number)
    if request["closed_stdout"]:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", closefd=False) for number, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    replacement = request["patch"]
    if replacement in ("full_disk", "slow_disk"):
        os.fsync = {"full_disk": full_disk, "slow_disk": slow_disk}[replacement]
    elif replacement == "read_only":
        importlib.import_module("kvloom.store.disk").write_file = read_only
    elif replacement == "bug":
        importlib.import_module("kvloom.indexing").index_documents = bug
    elif replacement:
        importlib.import_module("kvloom.demo").run.__kwdefaults__["model"] = replacement
    cli.main(request["args"])


def start(request: dict[str, Any]) -> int:
    """The id of the new process."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        run(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 120  # as Python itself would
        os._exit(code)


def main() -> None:
    """Serves until stdin ends."""
    warnings.simplefilter("ignore")  # of forking: no thread is running here
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = start(request["start"])
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
