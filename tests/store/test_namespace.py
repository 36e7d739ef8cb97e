from __future__ import annotations

import ast
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import loom_of

import kvloom
from kvloom.chunk_source import ChunkSource
from kvloom.errors import MethodError
from kvloom.store import DiskStore, chunk_key, open_store
from kvloom.store.namespace import namespace_id
from kvloom.trace import Trace

HEADER, CHUNK = torch.tensor([1, 2]), torch.tensor([3, -4])


def test_a_namespace_gives_other_keys_and_none_gives_those_of_before():
    keys = [chunk_key("model-a", HEADER, CHUNK, namespace=name) for name in ("", "acme", "acme2")]
    assert keys[0] == chunk_key("model-a", HEADER, CHUNK)
    assert len(set(keys)) == 3
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    assert keys[1] in document
    assert namespace_id("acme") in document


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_compressor_and_namespace_are_not_confused(compressor, namespace, other, other_namespace):
    one, two = (
        chunk_key("m", HEADER, CHUNK, compressor=c, namespace=n)
        for c, n in ((compressor, namespace), (other, other_namespace))
    )
    assert (one == two) is ((compressor, namespace) == (other, other_namespace))


@pytest.mark.parametrize("one", ["namespace", "compressor", "acme"])
@pytest.mark.parametrize("other", ["namespace", "compressor", "acme"])
def test_a_value_that_looks_like_a_name_is_none(one, other):
    """A compressor called as the namespace's field is, and the other way round."""
    keys = [
        chunk_key("m", HEADER, CHUNK, compressor=compressor, namespace=namespace)
        for compressor, namespace in {("", ""), (one, ""), ("", one), (one, other), (other, one)}
    ]
    assert len(set(keys)) == len(keys) == (5 if one != other else 4)


def test_a_store_makes_keys_of_its_namespace(tmp_path):
    for name in (None, "acme"):
        store = DiskStore(tmp_path, namespace=name)
        expected = chunk_key("m", HEADER, CHUNK, compressor="c", namespace=name or "")
        assert store.chunk_key("m", HEADER, CHUNK, compressor="c") == expected


def test_no_namespace_reads_lists_counts_or_deletes_what_another_has(tmp_path, make_key, make_chunk):
    """Not even by the other's own keys."""
    stores = [DiskStore(tmp_path)] + [open_store(f"disk:{tmp_path}?namespace={n}") for n in ("acme", "zeta")]
    for number, store in enumerate(stores):
        store.put(make_key(number), make_chunk(number))
    for number, store in enumerate(stores):
        assert list(store.keys()) == [make_key(number)]
        assert store.stats().entries == 1
        for other in {0, 1, 2} - {number}:
            assert store.get(make_key(other)) is None
            assert make_key(other) not in store
            assert store.describe(make_key(other)) is None
            assert store.delete(make_key(other)) is False
        assert store.verify() == []
        assert store.get(make_key(number)) is not None


def test_a_namespace_has_a_private_folder_whatever_it_is_called(tmp_path, make_key, make_chunk):
    for name in ("../../etc", "a/b", "CON", ".", "名前", "acme"):
        store = DiskStore(tmp_path / "chunks", namespace=name)
        store.put(make_key(0), make_chunk())
        assert store.path == tmp_path / "chunks" / "namespaces" / namespace_id(name)
        assert name not in str(store.path.relative_to(tmp_path / "chunks")) or name == "."
        for folder in (store.path, store.path.parent, store.path.parent.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunks"]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, "\0"])
def test_what_is_no_namespace_is_refused(tmp_path, name):
    with pytest.raises(MethodError, match="is not printable text of 1 to 200 characters"):
        DiskStore(tmp_path / "chunks", namespace=name)
    assert not (tmp_path / "chunks").exists()


def test_two_tenants_compute_the_same_chunk_each_for_itself(tmp_path):
    decoder = loom_of("llama").decoder
    header, chunk = torch.arange(5), torch.arange(20, 40)
    keys = {}
    for name in ("acme", "zeta", "acme"):
        source = ChunkSource(decoder, DiskStore(tmp_path, namespace=name))
        trace = Trace()
        list(source.supply(header, header, [chunk], trace))
        is_first = name not in keys
        assert (trace.prefilled_tokens, trace.reused_tokens) == ((25, 0) if is_first else (0, 25))
        keys[name] = sorted(source.store.keys())
    assert not set(keys["acme"]) & set(keys["zeta"])
    assert len(keys["acme"]) == 2


def test_no_room_but_the_store_makes_keys():
    """Whoever imports `chunk_key` could forget the namespace."""
    root = Path(kvloom.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name == "store":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            assert "chunk_key" not in names, f"{path.relative_to(root)}: use the store's own chunk_key"
