"""Store: where the KV of chunks lives between requests, and the keys it lives under.

A store maps a key to a `ChunkKV` and may lose any entry at any time: whoever asks must be able to compute it
again. So an entry that turns out wrong is a miss with a reason, never an exception, and it costs only itself.
"""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvloom.errors import MethodError, StoreError
from kvloom.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from torch import Tensor

    from kvloom.kv import ChunkKV

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # of keys, and of files that neither codec nor cipher made; see docs/format.md

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
_KEY = re.compile("[0-9a-f]{64}")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


@dataclass(frozen=True)
class Rejection:
    """An entry that turned out wrong, and why."""

    key: str
    reason: str
    set_aside: bool = True  # False: left in place, because it is not ours to move or cannot be moved


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds now, counted without reading the entries."""

    where: str
    entries: int
    num_bytes: int | None  # None: this store cannot tell without reading its entries
    limit_bytes: int | None = None  # None: no bound of its own
    rejected: int = 0  # entries found wrong since this store was opened
    quarantined: int = 0  # entries found wrong by anyone and kept aside for inspection


@dataclass(frozen=True, kw_only=True)
class EntryHead:
    """What an entry says of itself, its contents unread and unchecked."""

    key: str
    num_tokens: int
    num_bytes: int
    fingerprint: str
    start: int
    codec: str = "raw"  # how keys and values are written
    is_encrypted: bool = False


class Store(ABC):
    """A map from chunk keys to `ChunkKV`; four methods make a store, the others have working defaults.

    Keys are 64 lower-case hexadecimal characters (`chunk_key`); methods raise ``ValueError`` for any other.
    """

    name: str  # set by `stores.register`
    namespace: str = ""  # the tenant whose chunks it holds; `kvloom.store.namespace`

    def __init__(self) -> None:
        self.rejections: list[Rejection] = []

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """The store that ``SCHEME:rest`` names; raises ``MethodError`` when `rest` does not fit."""
        raise MethodError(f"store {cls.name!r} cannot be opened from {rest!r}; pass a {cls.__name__} instead")

    @abstractmethod
    def get(self, key: str) -> ChunkKV | None:
        """The entry, or None: it is absent, or it was found wrong and `rejections` says why."""

    @abstractmethod
    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is `kv`, whatever it was before; raises ``StoreError`` when it cannot be written."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """The entry is gone; True if it was there."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Every key; entries put or deleted meanwhile may or may not be among them."""

    def chunk_key(
        self, fingerprint: str, header_ids: Tensor, chunk_ids: Tensor, *, compressor: str = ""
    ) -> str:
        """`chunk_key` in this store's namespace: the one way to a key for whoever has a store."""
        namespace = self.namespace
        return chunk_key(fingerprint, header_ids, chunk_ids, compressor=compressor, namespace=namespace)

    @property
    def where(self) -> str:
        """The place, as messages name it."""
        return type(self).__name__

    def contains(self, key: str) -> bool:
        """True if there is an entry; its contents are not read, so `get` may still find it wrong."""
        check_key(key)
        return key in set(self.keys())

    def __contains__(self, key: str) -> bool:
        return self.contains(key)

    def describe(self, key: str) -> EntryHead | None:
        """The entry's head; or None: it is absent, or what was read is wrong and `rejections` says why."""
        kv = self.get(key)
        if kv is None:
            return None
        return EntryHead(
            key=key,
            num_tokens=kv.num_tokens,
            num_bytes=kv.num_bytes,
            fingerprint=kv.fingerprint,
            start=kv.start,
        )

    def stats(self) -> StoreStats:
        """What the store holds now."""
        entries = sum(1 for _ in self.keys())
        return StoreStats(where=self.where, entries=entries, num_bytes=None, rejected=len(self.rejections))

    def reject(self, key: str, reason: str) -> None:
        """The entry is out of the store, and remembered in `rejections`; an absent one is no rejection.

        For entries that turned out wrong: damaged, or made by another model. `reason` completes "the entry
        ...", as in "is of another model".
        """
        check_key(key)
        try:
            was_there = self._set_aside(key, reason)
        except StoreError:
            self._leave(key, reason)
        else:
            if was_there:
                self._note(Rejection(key, reason))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Rejection]:
        """Every entry has been read, and the wrong ones rejected and returned.

        `progress` is called after each entry with the number read so far and the number of all.
        """
        keys = list(self.keys())
        # What was left in place earlier is looked at again, so its old verdict must not count twice.
        self.rejections[:] = [rejection for rejection in self.rejections if rejection.set_aside]
        before = len(self.rejections)
        for done, key in enumerate(keys, start=1):
            self.get(key)
            if progress is not None:
                progress(done, len(keys))
        return self.rejections[before:]

    def _set_aside(self, key: str, reason: str) -> bool:
        """The entry is no longer served; True if it was there. Raises ``StoreError`` when it must stay."""
        return self.delete(key)

    def _leave(self, key: str, reason: str) -> None:
        """A miss that leaves the entry in place is remembered once, however often it is asked for."""
        rejection = Rejection(key, reason, set_aside=False)
        if rejection not in self.rejections:
            self._note(rejection)

    def _note(self, rejection: Rejection) -> None:
        self.rejections.append(rejection)
        fate = "set aside" if rejection.set_aside else "left in place"
        logger.warning("%s: entry %s %s; it is %s", self.where, rejection.key, rejection.reason, fate)


stores: Registry[Store] = Registry("store", "kvloom.store")


def open_store(url: str | Store) -> Store:
    """The store that a URL such as ``memory:4GiB`` or ``disk:~/chunks`` names; a `Store` comes back as it is.

    Raises ``MethodError`` for a URL that names no store, ``StoreError`` for a store that cannot be opened.
    """
    if isinstance(url, Store):
        return url
    if not isinstance(url, str):
        raise MethodError(f"store {url!r} is neither text nor a Store; write 'disk:{url}'")
    scheme, colon, rest = url.partition(":")
    if not colon and scheme in stores:
        raise MethodError(f"store {url!r} lacks its colon; write '{url}:'")
    if not url:
        raise MethodError("store '' names nothing; write 'memory:' or 'disk:PATH'")
    if not colon or not scheme.isidentifier():
        raise MethodError(f"store {url!r} has no scheme; for a folder write 'disk:{url}'")
    return stores[scheme].from_url(rest)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB`` (2**32), ``500MB`` (500 * 10**6) or ``4096``; at least 1.

    Units are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB in any case. Raises ``MethodError`` for anything else.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise MethodError(f"size {text!r} is not a number with a unit; write for example 4GiB or 500MB")
    # Integers only: a float would round sizes beyond 2**53.
    whole, _, fraction = match[1].partition(".")
    size = int(whole + fraction) * _UNITS[match[2]] // 10 ** len(fraction)
    if size < 1:
        raise MethodError(f"size {text!r} is less than one byte; write for example 4GiB or 500MB")
    return size


def check_key(key: str) -> None:
    """Raises ``ValueError`` unless `key` is 64 lower-case hexadecimal characters."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ValueError(f"key {key!r} is not 64 lower-case hexadecimal characters; make it with chunk_key")


def is_key(text: str) -> bool:
    """True if `text` could be a key."""
    return _KEY.fullmatch(text) is not None


def chunk_key(
    fingerprint: str,
    header_ids: Tensor,
    chunk_ids: Tensor,
    *,
    compressor: str = "",
    namespace: str = "",
) -> str:
    """The key of a chunk's KV: SHA-256 over format version, fingerprint, header ids, chunk ids, the
    compressor if one dropped some of its rows, and the namespace if there is one; never over the codec.

    `header_ids` and `chunk_ids` are (T,) of any signed integer type; raises ``ValueError`` for others.
    """
    parts = [b"kvloom-chunk", str(FORMAT_VERSION).encode(), fingerprint.encode()]
    for name, ids in (("header_ids", header_ids), ("chunk_ids", chunk_ids)):
        if ids.ndim != 1 or ids.dtype not in _INTEGERS:
            raise ValueError(f"{name} must be (T,) integers, got {tuple(ids.shape)} of {ids.dtype}")
        parts.append(ids.detach().cpu().numpy().astype("<i8").tobytes())
    if compressor:
        parts.append(compressor.encode())
    if namespace:
        parts += [b"namespace", namespace.encode()]
    return hashlib.sha256(b"".join(fields(parts))).hexdigest()


def fields(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Each part behind its length (8 bytes, little-endian): no two lists of parts give the same bytes."""
    for part in parts:
        yield len(part).to_bytes(8, "little")
        yield part
