"""The options are frozen here, and every one of them is read by its command."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import typer
from typer.main import get_command

from kvloom.cli.app import app

MODEL = {"--model -m", "--store", "--chunk-tokens", "--dtype", "--device"}
STORE = {"--store", "--namespace", "--json"}
BENCH = {"--model -m", "--lengths", "--out", "--dtype", "--device", "--json"}
OPTIONS = {
    "": {"--version"},  # and everywhere -h, --help
    "index": {"source", *MODEL, "--namespace", "--json", "--chunk-compressor", "--ray", "--ray-workers"},
    "ask": {
        "question",
        "source",
        *MODEL,
        *("--selector -s", "--option -o", "--reorder", "--top", "--json"),
        *("--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--stop"),
        *("--compressor -c", "--chunk-compressor", "--explain", "--namespace"),
    },
    "verify": {
        "source",
        *MODEL,
        *("--question -q", "--questions", "--selector -s", "--option -o", "--ratio", "--top", "--json"),
    },
    "methods": {"--json"},
    "eval": {
        *("sets", "--out", "--model -m", "--method -s", "--data", "--limit", "--chunks", "--chunk-tokens"),
        *("--header", "--max-context", "--max-new-tokens", "--seed", "--dtype", "--device", "--json"),
    },
    "report": {"runs", "--out", "--baseline"},
    "falsify": {
        *("sets", "--out", "--model -m", "--ratio", "--local", "--data", "--limit", "--max-context"),
        *("--dtype", "--device", "--json"),
    },
    "view": {
        *("question", "sources", *MODEL, "--out", "--selector -s", "--option -o", "--reorder", "--top"),
        *("--set", "--sample", "--data", "--json"),
    },
    "calibrate": {
        *("--model -m", "--text", "--samples", "--length", "--ratio", "--seed", "--out"),
        *("--dtype", "--device", "--json"),
    },
    "compress": {
        *("file", "--model -m", "--compressor -c", "--option -o", "--plain", "--max-new-tokens"),
        *("--decode-compressor -d", "--save", "--steps", "--layers", "--dtype", "--device", "--json"),
    },
    "fidelity": {
        *("sets", "--out", "--model -m", "--compressor -c", "--keep", "--documents", "--prefix"),
        *("--continuation", "--data", "--dtype", "--device", "--json"),
    },
    "influence": {
        *("sets", "--out", "--model -m", "--remove -r", "--share", "--direct", "--singles", "--window"),
        *("--documents", "--prefix", "--continuation", "--seed", "--data", "--dtype", "--device", "--json"),
    },
    "recall": {
        *("sets", "--out", "--model -m", "--compressor -c", "--keep", "--question -q", "--baseline"),
        *("--limit", "--max-context", "--max-new-tokens", "--seed", "--data", "--dtype", "--device"),
        "--json",
    },
    "solve": {
        *("sets", "--out", "--model -m", "--decode-compressor -d", "--compressor -c", "--keep", "--every"),
        *("--recent", "--max-new-tokens", "--baseline", "--limit", "--data", "--dtype", "--device"),
        "--json",
    },
    "demo": {"--questions", "--json"},
    "bench": set(),
    "bench ttft": {"--ratios", "--methods", "--repeats", "--chunk-tokens", *BENCH},
    "bench index": {"--repeats", "--chunk-tokens", *BENCH},
    "bench decode": {"--steps", "--repeats", *BENCH},
    "bench memory": {"--ratio", "--methods", "--chunk-tokens", *BENCH},
    "store": set(),
    "store stats": STORE,
    "store list": {"--documents", *STORE},
    "store rm": {"keys", "--all", "--yes", *STORE},
    "store add": {"source", *MODEL, "--namespace", "--json", "--chunk-compressor"},
    "store reindex": {"ids", *MODEL, "--namespace", "--json", "--chunk-compressor"},
    "store show": {"name", *STORE},
    "store pin": {"names", *STORE},
    "store unpin": {"names", *STORE},
    "store rebuild": STORE,
    "store verify": STORE,
}


def commands(command: Any = None, name: str = "") -> dict[str, Any]:
    """Every command by its name, groups included."""
    command = get_command(app) if command is None else command
    found = {name: command}
    for sub_name, sub in getattr(command, "commands", {}).items():
        found |= commands(sub, f"{name} {sub_name}".strip())
    return found


def test_the_options_are_these() -> None:
    found = {
        name: {" ".join(parameter.opts) for parameter in command.params} - {"--help", "-h --help"}
        for name, command in commands().items()
    }
    assert found == OPTIONS


def test_every_option_is_read_by_its_command() -> None:
    for name, command in commands().items():
        function = inspect.unwrap(command.callback)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        read = {
            node.id
            for statement in tree.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        assert set(inspect.signature(function).parameters) <= read, name


def test_every_option_has_help() -> None:
    for name, command in commands().items():
        assert all(parameter.help for parameter in command.params), name
        assert command.help, name
    assert isinstance(app, typer.Typer)
