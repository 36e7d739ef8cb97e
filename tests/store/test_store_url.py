from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import MethodError
from kvloom.store import DiskStore, MemoryStore, open_store
from kvloom.store.tiers import TieredStore
from kvloom.store.url import parse_duration, parse_seconds, split_options, split_tiers, with_option

DISK = "codec, deadline, encrypted_only, key_file, namespace, quota, sweep_after"
SCHEMES = {"memory", "disk", "redis", "fsspec"}


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("memory:", ["memory:"]),
        ("memory:4GiB,disk:/a,b/c", ["memory:4GiB", "disk:/a,b/c"]),
        ("disk:/a,redis://h:1/0,fsspec:s3://b/p", ["disk:/a", "redis://h:1/0", "fsspec:s3://b/p"]),
        ("disk:/a,s3://b", ["disk:/a,s3://b"]),
        ("disk:/a,,disk:/b", ["disk:/a,", "disk:/b"]),
        ("", [""]),
    ],
)
def test_tiers_are_cut_where_a_scheme_follows_the_comma(url, parts):
    assert split_tiers(url, SCHEMES) == parts


@given(
    st.lists(
        st.sampled_from(["memory:4GiB", "disk:/a,b", "redis://h:1/0?prefix=x:,"]), min_size=1, max_size=4
    )
)
def test_tiers_come_back_as_they_were_joined(parts):
    assert split_tiers(",".join(parts), SCHEMES) == parts


def test_options_of_a_disk_store(tmp_path):
    store = open_store(f"disk:{tmp_path}/a%3Fb%2Cdisk:c?quota=1.5KiB&sweep_after=60")
    assert isinstance(store, DiskStore)
    assert store.path == tmp_path / "a?b,disk:c"
    assert (store.quota_bytes, store.deadline_s) == (1536, None)
    assert open_store(f"disk:{tmp_path}").stats().limit_bytes is None


def test_several_urls_make_tiers(tmp_path):
    store = open_store(f"memory:1MiB,disk:{tmp_path}/chunks?quota=1GiB&deadline=0.25")
    assert isinstance(store, TieredStore)
    memory, disk = store.parts
    assert isinstance(memory, MemoryStore)
    assert isinstance(disk, DiskStore)
    assert (memory.limit_bytes, disk.quota_bytes, disk.deadline_s) == (2**20, 2**30, 0.25)
    again = open_store(f"tiers:memory:1MiB,disk:{tmp_path}/chunks")
    assert isinstance(again, TieredStore)
    assert [type(part) for part in again.parts] == [MemoryStore, DiskStore]
    assert store.where == f"memory, {tmp_path}/chunks"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("disk:x?qouta=1GiB", f"store 'disk' has no option 'qouta'; there are: {DISK}"),
        ("disk:x?quota=lots", "store 'disk': option 'quota': size 'lots' is not a number with a unit"),
        ("disk:x?sweep_after=-1", "option 'sweep_after': '-1' is not a number of seconds"),
        ("disk:x?deadline=0", "option 'deadline': 0 seconds leave no time; give more than 0"),
        ("disk:x?quota", "'quota' is not of the form option=value&option=value; write a question mark"),
        ("disk:x?quota=1&quota=2", "option 'quota' is given twice"),
        ("disk:?quota=1", "store 'disk:' names no folder; write 'disk:PATH'"),
        ("memory:1GiB?quota=2", "store 'memory' has no option 'quota'; there are: namespace"),
        ("memory:1GiB,disk:", "store 'disk:' names no folder"),
        ("tiers:", "store 'tiers:' names no tier; write for example memory:4GiB,disk:PATH"),
        ("redis:", "store 'redis:' names no server"),
        ("redis://h:x/0", "store 'redis': Port could not be cast"),
        ("redis://h:99999/0", "store 'redis': Port out of range"),
        ("redis://h/db", "a database that is no number"),
        (
            "redis://h?time=1",
            "has no option 'time'; there are: codec, deadline, encrypted_only, key_file, namespace, prefix,",
        ),
        ("redis://h?tls=yes", "option 'tls': 'yes' is neither true nor false"),
        ("fsspec:/a", "store 'fsspec:/a' names no file system; write for example fsspec:s3://bucket/kv"),
        (
            "fsspec:memory://a?x=1",
            "store 'fsspec' has no option 'x'; there are: codec, deadline, encrypted_only, key_file,",
        ),
    ],
)
def test_wrong_urls_are_refused_in_a_sentence(url, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MethodError) as caught:
        open_store(url)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=3), st.text())
def test_options_come_back_as_they_were_quoted(options, place):
    from urllib.parse import quote, urlencode

    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    assert split_options("disk", quote(place) + query) == (place, options)


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("codec=int8+zstd", {"codec": "int8+zstd"}),
        ("codec=int8%2Bzstd&key_file=/a+b/c%20d", {"codec": "int8+zstd", "key_file": "/a+b/c d"}),
        ("+=+", {"+": "+"}),
    ],
)
def test_a_plus_is_a_plus(query, options):
    assert split_options("disk", f"/a+b?{query}") == ("/a+b", options)


@given(st.text(min_size=1), st.text(), st.text())
def test_one_more_option(name, value, other):
    from urllib.parse import quote

    url = with_option("disk:/a", quote(name, safe=""), value)
    assert split_options("disk", url) == ("disk:/a", {name: value})
    if name != "other":
        both = with_option(url, "other", other)
        assert split_options("disk", both) == ("disk:/a", {name: value, "other": other})
    assert split_tiers(url, SCHEMES) == [url]


@given(st.text())
def test_any_text_is_options_or_a_sentence(text):
    with contextlib.suppress(MethodError):
        place, options = split_options("disk", text)
        assert len(place) + len(options) <= len(text)


def test_seconds():
    assert (parse_duration("0"), parse_seconds("0.5"), parse_seconds("1e3")) == (0, 0.5, 1000)
    for text in ("", "nan", "inf", "-0.1", "1s"):
        with pytest.raises(MethodError, match="is not a number of seconds; write for example 0"):
            parse_duration(text)
