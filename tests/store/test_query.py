from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import MethodError
from kvloom.store import DiskStore, open_store
from kvloom.store.query import ENTRY_OPTIONS, convert, split_query


@pytest.mark.parametrize(
    ("rest", "parts"),
    [
        ("/a/b", ("/a/b", {})),
        ("/a?", ("/a", {})),
        ("/a?codec=int8+zstd&namespace=a%26b", ("/a", {"codec": "int8+zstd", "namespace": "a&b"})),
        ("/a?encrypted_only", ("/a", {"encrypted_only": ""})),
        ("/a?key_file=/b?c=d", ("/a", {"key_file": "/b?c=d"})),
    ],
)
def test_split_query(rest, parts):
    assert split_query(rest) == parts


@given(st.dictionaries(st.from_regex("[a-z_]+", fullmatch=True), st.from_regex("[^&%]*", fullmatch=True)))
def test_options_come_back(options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    assert split_query(f"place?{query}") == ("place", options)


@pytest.mark.parametrize("query", ["codec=a&codec=b", "=x", "codec=a&&namespace=b"])
def test_split_query_refuses_what_it_cannot_place(query):
    with pytest.raises(MethodError, match=r"is given twice|has no name"):
        split_query(f"/a?{query}")


def test_convert():
    text = {"codec": "int8", "encrypted_only": "true"}
    assert convert(text, ENTRY_OPTIONS) == {"codec": "int8", "encrypted_only": True}
    assert convert({"encrypted_only": "false"}, ENTRY_OPTIONS) == {"encrypted_only": False}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("codek=int8", r"unknown store option 'codek'; did you mean 'codec'\?"),
        ("encrypted_only=maybe", "store option encrypted_only: 'maybe' is neither true nor false"),
        ("namespace=", "namespace '' is not printable text"),
        ("codec=", "unknown codec ''"),
    ],
)
def test_a_disk_store_refuses_what_it_does_not_know(tmp_path, query, message):
    with pytest.raises(MethodError, match=message):
        open_store(f"disk:{tmp_path / 'chunks'}?{query}")
    assert not (tmp_path / "chunks").exists()


def test_options_reach_the_store(tmp_path):
    store = open_store(f"disk:{tmp_path}?codec=int4&namespace=acme")
    assert isinstance(store, DiskStore)
    assert (str(store.packing.coding), store.namespace) == ("int4", "acme")


def test_options_alone_name_no_folder():
    with pytest.raises(MethodError, match="names no folder; write 'disk:PATH'"):
        open_store("disk:?codec=int8")
