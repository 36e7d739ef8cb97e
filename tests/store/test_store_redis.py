"""Against a real server, which is stopped, paused and started again while it is asked."""

from __future__ import annotations

import logging
import time

import pytest
import redis
from redis_server import BINARY, Server

from kvloom.errors import StoreError
from kvloom.store import MemoryStore, open_store
from kvloom.store.base import Unreachable
from kvloom.store.format import encode
from kvloom.store.lookup import Miss
from kvloom.store.redis import RedisStore
from kvloom.store.tiers import TieredStore

pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no redis-server here; apt-get install redis-server, or valkey-server"
)

PREFILL = 1000.0  # tokens a second
TOKENS = 100  # so a chunk is worth 0.1 s
SLACK_S = 0.15  # for a machine that has other work


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def client(server):
    client = redis.Redis(port=server.port)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def store(server, client):
    store = RedisStore("127.0.0.1", server.port, timeout_s=0.5)
    yield store
    store._client.close()


def test_values_are_the_bytes_of_the_format(store, client, make_chunk, make_key, assert_same):
    key = make_key(0)
    assert store.lookup(key).reason is Miss.UNKNOWN
    store.put(key, make_chunk(1 / 3))
    content = b"".join(encode(key, make_chunk(1 / 3)))
    assert client.get(f"kvloom:{key}") == content
    found = store.lookup(key)
    assert_same(found.kv, make_chunk(1 / 3))
    assert (found.tier, found.num_bytes) == ("redis", len(content))
    assert found.seconds > 0


def test_the_four_methods(store, client, make_chunk, make_key, assert_same):
    keys = sorted(make_key(number) for number in range(5))
    for number, key in enumerate(keys):
        store.put(key, make_chunk(number))
    client.set("kvloom:notes", b"stray")
    client.set(f"other:{make_key(9)}", b"stray")
    client.set("kvloom:\xff\xfe", b"stray")
    assert list(store.keys()) == keys
    assert store.stats().entries == 5
    assert keys[0] in store
    assert store.delete(keys[0]) is True
    assert store.delete(keys[0]) is False
    assert keys[0] not in store
    store.put(keys[1], make_chunk(9, tokens=5))
    assert_same(store.get(keys[1]), make_chunk(9, tokens=5))
    head = store.describe(keys[1])
    assert (head.num_tokens, head.fingerprint, head.start) == (5, "model-a", 7)
    assert head.num_bytes == client.strlen(f"kvloom:{keys[1]}")
    assert store.describe(keys[0]) is None


def test_a_long_header_is_described_too(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk(layers=1200))
    assert store.describe(make_key(0)).num_tokens == 3
    assert len(store.get(make_key(0)).keys) == 1200


@pytest.mark.parametrize("prefix", ["a*[b]?\\:", "", "ü:"])
def test_stores_with_other_prefixes_are_apart(server, client, make_chunk, make_key, prefix):
    one = RedisStore("127.0.0.1", server.port, prefix=prefix)
    two = RedisStore("127.0.0.1", server.port, prefix="axb:")
    one.put(make_key(0), make_chunk())
    two.put(make_key(1), make_chunk())
    assert list(one.keys()) == [make_key(0)]
    assert list(two.keys()) == [make_key(1)]
    assert make_key(0) not in two
    for store in (one, two):
        store._client.close()


@pytest.mark.parametrize("fault", ["a byte", "cut short", "another key", "empty"])
def test_a_damaged_value_is_a_miss_with_a_reason(store, client, make_chunk, make_key, fault):
    key = make_key(0)
    content = bytearray(b"".join(encode(key, make_chunk())))
    if fault == "a byte":
        content[-3] ^= 1
    elif fault == "cut short":
        content = content[:300]
    elif fault == "another key":
        content = bytearray(b"".join(encode(make_key(1), make_chunk())))
    else:
        content = bytearray()
    client.set(f"kvloom:{key}", bytes(content))
    found = store.lookup(key)
    assert found.reason is Miss.DAMAGED
    assert found.detail == store.rejections[0].reason
    assert store.get(key) is None
    assert client.exists(f"kvloom:{key}") == 0
    assert len(store.rejections) == 1


def test_a_value_of_another_type_is_refused_and_stays(store, client, make_key, make_chunk):
    client.lpush(f"kvloom:{make_key(0)}", b"x")
    found = store.lookup(make_key(0))
    assert found.reason is Miss.UNREADABLE
    assert "refuses: wrongtype" in found.detail.lower()
    assert client.exists(f"kvloom:{make_key(0)}") == 1


def test_a_later_version_stays(store, client, make_chunk, make_key):
    content = b"".join(encode(make_key(0), make_chunk())).replace(b'"version":"1"', b'"version":"9"')
    client.set(f"kvloom:{make_key(0)}", content)
    assert store.lookup(make_key(0)).reason is Miss.UNREADABLE
    assert client.exists(f"kvloom:{make_key(0)}") == 1


def test_a_full_server_refuses_in_a_sentence(store, client, make_chunk, make_key):
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreError, match=r"redis://127.0.0.1:.*/0 refuses: .*maxmemory"):
            store.put(make_key(0), make_chunk())
        assert store.stats().limit_bytes == 1
    finally:
        client.config_set("maxmemory", "0")
    store.put(make_key(0), make_chunk())


def test_a_password_is_used_and_never_shown(tmp_path, make_chunk, make_key, caplog):
    server = Server(tmp_path, "--requirepass", "geheim@wort")
    try:
        url = f"127.0.0.1:{server.port}/2"
        store = open_store(f"redis://:geheim%40wort@{url}")
        store.put(make_key(0), make_chunk())
        assert store.get(make_key(0)) is not None
        assert store.where == f"redis://{url}"
        with caplog.at_level(logging.DEBUG, "kvloom"):
            wrong = open_store(f"redis://:falsch@{url}")
            assert wrong.lookup(make_key(0)).reason in (Miss.UNREADABLE, Miss.DOWN)
            with pytest.raises(StoreError) as caught:
                wrong.put(make_key(0), make_chunk())
        for text in (str(caught.value), caplog.text, repr(wrong.stats())):
            assert "falsch" not in text
    finally:
        server.stop()


def test_a_server_that_is_not_there_is_a_sentence(make_chunk, make_key, server):
    store = RedisStore("127.0.0.1", 1, timeout_s=0.5)
    for call in (lambda: store.put(make_key(0), make_chunk()), lambda: list(store.keys()), store.stats):
        with pytest.raises(Unreachable, match=r"redis://127.0.0.1:1/0 does not answer: .*refused"):
            call()
    found = store.lookup(make_key(0))
    assert (found.kv, found.reason) == (None, Miss.DOWN)
    opened = open_store("redis://127.0.0.1:1/0")
    assert opened.get(make_key(0)) is None
    assert opened.stats().tiers[0].entries is None


def tiers(server: Server) -> TieredStore:
    """Memory that forgets everything, so that each request goes to the server, asked for a chunk's worth."""
    store = TieredStore([MemoryStore(1), RedisStore("127.0.0.1", server.port, timeout_s=0.3)])
    store.set_prefill_speed(PREFILL)
    return store


def ask(store: TieredStore, keys: list[str]) -> tuple[list, float]:
    """What became of each request, and the longest of them."""
    found = [store.lookup(key, num_tokens=TOKENS) for key in keys]
    for key, lookup in zip(keys, found, strict=True):
        if lookup.kv is not None:
            assert lookup.kv.keys[0][0, 0, 0] == keys.index(key), "another chunk's KV"
    return found, max(lookup.seconds for lookup in found)


def wait_for(store: TieredStore, keys: list[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while store.lookup(keys[0], num_tokens=TOKENS).kv is None:
        assert time.monotonic() < end, store.stats()
        time.sleep(0.05)


@pytest.mark.parametrize("outage", ["stopped", "paused"])
def test_an_outage_costs_no_more_than_computing_and_ends_by_itself(
    tmp_path, make_chunk, make_key, outage, caplog
):
    server = Server(tmp_path)
    store = tiers(server)
    keys = [make_key(number) for number in range(20)]
    try:
        for number, key in enumerate(keys):
            store.put(key, make_chunk(number, tokens=TOKENS))
        store.flush()
        found, _ = ask(store, keys)
        assert [lookup.tier for lookup in found] == ["redis"] * 20

        server.stop() if outage == "stopped" else server.pause()
        start = time.perf_counter()
        found, longest = ask(store, keys)
        elapsed = time.perf_counter() - start
        assert {lookup.reason for lookup in found} <= {Miss.DOWN, Miss.DEADLINE}
        assert longest < TOKENS / PREFILL + SLACK_S
        assert elapsed < 20 * TOKENS / PREFILL  # less than computing all of them
        end = time.monotonic() + 5
        while store.stats().tiers[1].breaker != "open":
            assert time.monotonic() < end
            ask(store, keys[:1])
        start = time.perf_counter()
        found, longest = ask(store, keys)
        assert longest < TOKENS / PREFILL + SLACK_S
        assert time.perf_counter() - start < 0.5
        assert Miss.DOWN in {lookup.reason for lookup in found}
        with pytest.raises(StoreError):  # nowhere that lasts
            store.put(keys[0], make_chunk(0, tokens=TOKENS))

        server.start() if outage == "stopped" else server.resume()
        if outage == "stopped":  # it kept nothing
            end = time.monotonic() + 20
            while store.stats().tiers[1].breaker != "closed":
                assert time.monotonic() < end
                time.sleep(0.05)
            for number, key in enumerate(keys):
                store.put(key, make_chunk(number, tokens=TOKENS))
            store.flush()
        wait_for(store, keys, 20)
        found, _ = ask(store, keys)
        assert [lookup.tier for lookup in found] == ["redis"] * 20
        assert store.stats().tiers[1].breaker == "closed"
        assert store.rejections == []
    finally:
        server.stop()
