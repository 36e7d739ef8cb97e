"""Imports point down: each room may name rooms of its own layer or below, at module level and inside
functions.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvloom

ROOT = Path(kvloom.__file__).parent
LAYERS = [
    {"errors", "registry", "paths"},
    {"kv", "attention", "trace"},
    {
        "bundled",
        "cache",
        "fingerprint",
        "attention_function",
        "taps",
        "hf",
        "layout",
        "loading",
        "store",
        "tokenizer",
    },
    {"prefill", "splice", "recompute", "generate", "observe"},
    {"probe", "cache_probe", "families"},
    {"selectors", "compressors"},
    {
        "answer_options",
        "chunk_source",
        "conversation",
        "documents",
        "indexing",
        "long_answer",
        "loom",
        "profile",
        "prompt",
        "ray_cluster",
        "ray_indexing",
        "retrieve",
        "turns",
        "verify",
    },
    {"bench", "demo", "eval"},
    {"cli", "__main__"},
]
"""Rooms from the ground up. A chunk source uses prefill and a store; methods see a probe and never the
engine.
"""

SEAM = ("hf.py", "attention_function.py", "taps.py", "fingerprint.py", "cache.py")
"""The rooms that know transformers' models from within."""

FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def level(name: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if name in rooms)


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names = [node.module or ""]
            if node.module == "kvloom":
                names = [f"kvloom.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        rooms.update(name.split(".")[1] for name in names if name.startswith("kvloom."))
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    upward = {name for name in imported_rooms(path) if level(name) > level(room(path))}
    assert not upward, f"{path.relative_to(ROOT)} (layer {level(room(path))}) imports {upward} from above"


def test_every_room_has_a_layer_and_every_layer_its_rooms() -> None:
    assert {room(path) for path in FILES} == set().union(*LAYERS)


def test_transformers_is_named_in_few_rooms_only() -> None:
    namers = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(
            line.lstrip().startswith(("import transformers", "from transformers"))
            for line in path.read_text().splitlines()
        )
    }
    assert namers <= {
        *SEAM,
        "loading.py",
        "bundled.py",
        "tokenizer.py",
        "loom.py",
        "cli/output.py",
        "bench/models.py",
    }
    attributes = ("self_attn", ".embed_tokens", "lm_head", "layer_idx", "past_key_values", "model.model")
    for path in FILES:
        if path.name not in (*SEAM, "families.py"):
            assert not [name for name in attributes if name in path.read_text()], path.name


def test_rooms_stay_small() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > 400} == {}


def test_the_contributors_table_is_this_one() -> None:
    table = (ROOT.parent / "CONTRIBUTING.md").read_text()
    for number, rooms in enumerate(LAYERS):
        row = next(line for line in table.splitlines() if line.startswith(f"| {number} |"))
        named = {name.strip("` ") for name in row.split("|")[2].split(",")}
        assert named == rooms - {"__main__"}, f"layer {number}"
