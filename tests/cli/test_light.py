"""Help and wrong use are answered at once: nothing heavy is imported. Real processes, not forks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

import kvloom

HEAVY = ["torch", "transformers", "pydantic", "bm25s", "numpy", "rich", "safetensors", "tokenizers"]
WRAPPER = f"""
import json, sys
from kvloom.cli import main
try:
    main(json.loads(sys.argv[1]))
finally:
    sys.stderr.write("\\nimported: " + ",".join(name for name in {HEAVY!r} if name in sys.modules))
"""
COMMANDS = [
    "",
    "index",
    "ask",
    "verify",
    "methods",
    "demo",
    "eval",
    "report",
    "falsify",
    "view",
    "calibrate",
    "compress",
    "fidelity",
    "influence",
    "recall",
    "solve",
    "store",
    "store stats",
    "store list",
    "store rm",
    "store add",
    "store reindex",
    "store show",
    "store pin",
    "store unpin",
    "store rebuild",
    "store verify",
]


def run(*args: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The command line, ended, and what heavy modules it imported."""
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, json.dumps(args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    errors, _, imported = done.stderr.rpartition("\nimported: ")
    done.stderr = errors
    return done, imported


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str) -> None:
    done, imported = run(*command.split(), "--help")
    assert (done.returncode, done.stderr, imported) == (0, "", "")
    assert done.stdout.startswith(f"Usage: kvloom {command}".rstrip())


def test_help_is_quick() -> None:
    """Processor time, which other work on the machine changes little; about 0.2 s, the least of several."""
    seconds = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "kvloom", "ask", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


def test_version_and_no_command() -> None:
    done, imported = run("--version")
    assert (done.stdout, imported) == (f"kvloom {kvloom.__version__}\n", "")
    done, imported = run()
    assert done.stdout.startswith("Usage: kvloom")
    assert (done.returncode, imported) == (0, "")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["aks"], "no such command 'aks'. Did you mean 'ask'? (see kvloom --help)"),
        (
            ["index", "--chunk", "3"],
            "no such option: --chunk (Possible options: --chunk-tokens) (see kvloom index --help)",
        ),
        (["ask", "why"], "missing argument 'SOURCE' (see kvloom ask --help)"),
        (
            ["ask", "", "texts", "-m", "m"],
            "texts does not exist; give a file, a folder, or - for standard input",
        ),
        (["ask", " ", ".", "-m", "m"], "the question is empty; ask something"),
        (
            ["ask", "why", "."],
            "no model is named; give one with -m or KVLOOM_MODEL, for example -m bundled:smollm2",
        ),
        (
            ["index", ".", "-m", "m", "--store", "memory:"],
            "store 'memory:' lives and ends with one process; name one that lasts, such as disk:PATH",
        ),
        (
            ["ask", "-", "-", "-m", "m"],
            "question and documents cannot both come from standard input; write one of them out",
        ),
        (
            ["ask", "why", ".", "-m", "m", "-o", "ratio"],
            "option 'ratio' is not of the form NAME=VALUE, for example ratio=0.15",
        ),
        (
            ["store", "stats", "--store", "memory:1GiB"],
            "store 'memory:1GiB' lives and ends with one process; name one that lasts, such as disk:PATH",
        ),
        (["store", "rm"], "name the entries to remove by their keys, or all of them with --all --yes"),
        (["store", "rm", "--all"], "--all removes every entry; confirm it with --yes"),
    ],
)
def test_wrong_use_is_refused_before_torch_is_imported(args: list[str], sentence: str) -> None:
    done, imported = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvloom: error: {sentence}\n"
    assert "torch" not in imported.split(",")
