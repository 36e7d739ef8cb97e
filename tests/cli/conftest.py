"""Fixtures: the command line as its own processes, and a tiny model with a real tokenizer for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import Kvloom
from tiny_folder import TEXTS, save_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    yield server
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


@pytest.fixture
def kvloom(fork_server: subprocess.Popen[str], tmp_path: Path) -> Kvloom:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "KVLOOM_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    return Kvloom(fork_server, tmp_path, env)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of three documents."""
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Sixty short documents, one a line."""
    path = tmp_path / "many.jsonl"
    lines = [
        {"id": f"d{n}", "text": f"Barge {n} carried {n * 7} tons of grey stone up the river."}
        for n in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path
