"""Kvloom: command lines as processes of their own, started by the fork server; what their tests look at."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable


@dataclass
class Done:
    """A command line that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def sentence(self) -> str:
        """The one line on stderr; there must be no other."""
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]


@dataclass
class Kvloom:
    """Starts ``kvloom`` command lines with an environment and a cache folder of their own."""

    server: subprocess.Popen[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    count: int = 0

    @property
    def store(self) -> Path:
        """The folder of the store that is used unless another is named."""
        return Path(self.env["KVLOOM_CACHE"]) / "store"

    def _ask(self, request: dict[str, Any]) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        assert answer, "the fork server has ended; its stderr says why"
        return int(answer)

    def start(
        self,
        *args: str | Path,
        stdin: str | bytes = b"",
        env: dict[str, str] | None = None,
        patch: str = "",
        stderr: str = "",
        closed_stdout: bool = False,
    ) -> Callable[[], Done]:
        """Starts the command line; the function returned waits for its end. `start.pid` is its process id."""
        self.count += 1
        paths = {name: self.folder / f"{self.count}.{name}" for name in ("stdin", "stdout", "stderr")}
        paths["stdin"].write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        request = {
            **{name: str(path) for name, path in paths.items()},
            "args": [str(arg) for arg in args],
            "env": {**self.env, **(env or {})},
            "cwd": str(self.folder),
            "patch": patch,
            "closed_stdout": closed_stdout,
        }
        if stderr:
            request["stderr"] = stderr
        pid = self._ask({"start": request})

        def wait() -> Done:
            code = self._ask({"wait": pid})
            texts = [
                paths[name].read_text(encoding="utf-8") if paths[name].exists() else ""
                for name in ("stdout", "stderr")
            ]
            assert "Traceback" not in texts[1] or "KVLOOM_TRACEBACK" in (env or {}), texts[1]
            return Done(code, *texts)

        wait.pid = pid  # type: ignore[attr-defined]
        return wait

    def __call__(self, *args: str | Path, **options: Any) -> Done:
        return self.start(*args, **options)()

    def ok(self, *args: str | Path, **options: Any) -> Done:
        """The command line must succeed."""
        done = self(*args, **options)
        assert done.code == 0, done.stderr
        return done

    def refused(self, *args: str | Path, code: int = 2, **options: Any) -> str:
        """The command line must end with the code and print nothing but one sentence, which is returned."""
        done = self(*args, **options)
        assert (done.code, done.stdout) == (code, ""), (done.code, done.stdout, done.stderr)
        assert done.sentence.startswith("kvloom: error: ")
        return done.sentence.removeprefix("kvloom: error: ")


def entries(store: Path) -> list[Path]:
    """The entries of a disk store."""
    return sorted(path for path in store.glob("??/*.safetensors"))


def leftovers(store: Path) -> list[Path]:
    """Files that a writer left unfinished."""
    return sorted(store.rglob("*.tmp"))


def wait_until(is_so: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Returns once it is so."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def interrupt(pid: int) -> None:
    """Ctrl-C."""
    os.kill(pid, signal.SIGINT)


def copy_model(source: Path, target: Path, *, without: str) -> Path:
    """A copy of a model folder that lacks the files of a pattern."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(without))
    return target
