"""A store in a Redis or Valkey server: one value per chunk, the bytes of its file (docs/format.md).

The server evicts by its own policy (``maxmemory``), so an entry that is not there has no record of why.
Needs the package ``redis`` (extra ``redis``).
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

import numpy

from kvloom.errors import MethodError, StoreError
from kvloom.store.base import EntryHead, Store, StoreStats, Unreachable, check_key, is_key, stores
from kvloom.store.container import MAX_HEADER_BYTES
from kvloom.store.format import DamagedEntry, UnreadableEntry, decode_head, head_bytes
from kvloom.store.lookup import Lookup, Miss
from kvloom.store.namespace import namespace_id
from kvloom.store.packing import ENTRY_OPTIONS, Packing, entry_arguments
from kvloom.store.url import parse_bool, parse_seconds, read_options, split_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from kvloom.kv import ChunkKV

PREFIX = "kvloom:"
TIMEOUT_S = 1.0
MAX_VALUE_BYTES = 512 * 2**20  # Redis's own limit
_HEAD_BYTES = 64 * 2**10  # enough for most headers, so that one request reads them
_SPECIAL = re.compile(r"([\\*?\[\]])")  # of the patterns that SCAN takes


@stores.register("redis")
class RedisStore(Store):
    """Entries are values under `prefix`, that of the `namespace`, and their key, written by `packing`.

    The server is not asked before the first call.
    """

    is_remote: ClassVar[bool] = True

    def __init__(
        self,
        host: str,
        port: int = 6379,
        database: int = 0,
        *,
        prefix: str = PREFIX,
        timeout_s: float = TIMEOUT_S,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        packing: Packing | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__()
        self.packing = Packing.of() if packing is None else packing
        self.namespace = namespace or ""
        try:
            import redis
            from redis import exceptions
        except ImportError:
            raise StoreError("a redis store needs the package redis; pip install 'kvloom[redis]'") from None
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._failures = exceptions.ConnectionError, exceptions.TimeoutError, OSError
        self._refusals = exceptions.RedisError
        self._where = f"redis://{host}:{port}/{database}"
        self._prefix = prefix if namespace is None else f"{prefix}{namespace_id(namespace)}:"
        # One try: whether and when to ask again is the breaker's to say.
        self._client: Any = redis.Redis(
            host=host,
            port=port,
            db=database,
            username=username,
            password=password,
            ssl=tls,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``redis://[USER:PASSWORD@]HOST:PORT/DB?prefix=TEXT&timeout=SECONDS&tls=true&deadline=SECONDS``,
        a namespace, and how entries are packed.
        """
        readers = {"prefix": str, "timeout": parse_seconds, "tls": parse_bool, "deadline": parse_seconds}
        readers |= ENTRY_OPTIONS
        place, mark, query = rest.partition("?")
        options = read_options(cls.name, split_options(cls.name, f"{mark}{query}")[1], readers)
        wanted = "write for example redis://localhost:6379/0"
        try:
            parts = urlsplit(f"redis:{place}")
            host, port = parts.hostname, parts.port or 6379
        except ValueError as error:
            raise MethodError(f"store 'redis': {error}; {wanted}") from None
        database = parts.path.removeprefix("/") or "0"
        if not host or not database.isdecimal():
            raise MethodError(f"store 'redis:' names no server, or a database that is no number; {wanted}")
        store = cls(
            host,
            port,
            int(database),
            prefix=options.get("prefix", PREFIX),
            timeout_s=options.get("timeout", TIMEOUT_S),
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            tls=options.get("tls", False),
            **entry_arguments(options),
        )
        store.deadline_s = options.get("deadline")
        return store

    @property
    def where(self) -> str:
        return self._where

    def get(self, key: str) -> ChunkKV | None:
        """The entry; or None: absent, found wrong (see `rejections`), or the server does not answer."""
        return self.lookup(key).kv

    def _find(self, key: str) -> Lookup:
        try:
            with self._answering():
                content = self._client.get(self._name(key))
        except Unreachable as error:
            return self._miss(key, Miss.DOWN, str(error))
        except StoreError as error:
            return self._miss(key, Miss.UNREADABLE, str(error))
        if content is None:
            return self._miss(key, *self.absence(key))
        try:
            writable = numpy.frombuffer(content, dtype=numpy.uint8).copy().data
            return self._hit(key, self.packing.unpack(key, writable), len(content))
        except (UnreadableEntry, DamagedEntry) as error:
            return self._miss(key, *self._fault(key, error))

    def put(self, key: str, kv: ChunkKV) -> None:
        start = time.perf_counter()
        content = b"".join(self.packing.pack(key, kv))
        if len(content) > MAX_VALUE_BYTES:
            raise StoreError(
                f"cannot write to {self.where}: the entry has {len(content):,} bytes, a value at most "
                f"{MAX_VALUE_BYTES:,}; index with smaller chunks"
            )
        with self._answering():
            self._client.set(self._name(key), content)
        self.metrics.stored(self.label, len(content), time.perf_counter() - start)

    def delete(self, key: str) -> bool:
        with self._answering():
            return bool(self._client.delete(self._name(key)))

    def keys(self) -> Iterator[str]:
        pattern = _SPECIAL.sub(r"\\\1", self._prefix) + "*"
        with self._answering():
            names = set(self._client.scan_iter(match=pattern, count=1000))
        begin = len(self._prefix.encode())
        yield from sorted(key for name in names if is_key(key := name[begin:].decode(errors="replace")))

    def contains(self, key: str) -> bool:
        with self._answering():
            return bool(self._client.exists(self._name(key)))

    def describe(self, key: str) -> EntryHead | None:
        name = self._name(key)
        with self._answering():
            num_bytes = self._client.strlen(name)
            beginning = self._client.getrange(name, 0, _HEAD_BYTES - 1)
            if num_bytes and (needed := head_bytes(beginning[:8], num_bytes)) > len(beginning):
                beginning = self._client.getrange(name, 0, min(needed, MAX_HEADER_BYTES + 8) - 1)
        if num_bytes == 0:
            return None
        try:
            return decode_head(key, memoryview(beginning), num_bytes)
        except (UnreadableEntry, DamagedEntry) as error:
            self._fault(key, error)
            return None

    def stats(self) -> StoreStats:
        """What the server holds under the prefix; its bytes are not asked for."""
        with self._answering():
            limit = int(self._client.info("memory").get("maxmemory", 0))
        return StoreStats(
            where=self.where,
            entries=sum(1 for _ in self.keys()),
            num_bytes=None,
            limit_bytes=limit or None,
            rejected=len(self.rejections),
        )

    def _name(self, key: str) -> str:
        check_key(key)
        return self._prefix + key

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Inside, what the client raises is a ``StoreError``: ``Unreachable`` when there was no answer."""
        try:
            yield
        except self._failures as error:
            raise Unreachable(f"{self.where} does not answer: {_cause(error)}") from error
        except self._refusals as error:
            raise StoreError(f"{self.where} refuses: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text[:1].lower() + text[1:]
