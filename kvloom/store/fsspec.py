"""A store in any file system that fsspec opens: S3, Google and Azure storage, SFTP, HDFS and so on.

Files and their names are those of the disk store (docs/format.md). Needs the package ``fsspec`` (extra
``fsspec``), and the one that fsspec names for the file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy

from kvloom.errors import MethodError, StoreError
from kvloom.store.base import EntryHead, Store, Unreachable, check_key, is_key, stores
from kvloom.store.folder import NAMESPACES, SUFFIX, entry_name
from kvloom.store.format import DamagedEntry, UnreadableEntry, decode_head, head_bytes
from kvloom.store.lookup import Lookup, Miss
from kvloom.store.namespace import namespace_id
from kvloom.store.packing import ENTRY_OPTIONS, Packing, entry_arguments
from kvloom.store.url import parse_seconds, read_options, split_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

    from kvloom.kv import ChunkKV

OPTION = "fs."  # what begins with it is for the file system
_HEAD_BYTES = 64 * 2**10
_WHOLE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"}
"""Protocols whose files come into being whole; elsewhere a temporary one is written and moved."""


@stores.register("fsspec")
class FsspecStore(Store):
    """Entries are files below the URL, in a folder of its own for a `namespace`, written by `packing`.

    One that turns out wrong is deleted, with its reason in the log. `options` are the file system's own.
    """

    is_remote: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        packing: Packing | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__()
        self.packing = Packing.of() if packing is None else packing
        self.namespace = namespace or ""
        room = "" if namespace is None else f"/{NAMESPACES}/{namespace_id(namespace)}"
        try:
            import fsspec
        except ImportError:
            raise StoreError(
                "an fsspec store needs the package fsspec; pip install 'kvloom[fsspec]'"
            ) from None
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options or {})
        except Exception as error:  # file systems raise what they like, and name the package that they need
            raise StoreError(f"cannot open {_masked(url)}: {_cause(error)}") from error
        self._root = f"{self._root.rstrip('/')}{room}"
        self._where = _masked(url)
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._is_whole = bool(protocols & _WHOLE)

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``fsspec:URL?deadline=SECONDS&namespace=NAME&fs.NAME=VALUE``, and how entries are packed; ``fs.``
        options are the file system's own.
        """
        place, given = split_options(cls.name, rest)
        if "://" not in place:
            raise MethodError(
                f"store 'fsspec:{place}' names no file system; write for example fsspec:s3://bucket/kv"
            )
        own = {name: value for name, value in given.items() if not name.startswith(OPTION)}
        for_fs = {name.removeprefix(OPTION): given[name] for name in given.keys() - own.keys()}
        options = read_options(cls.name, own, ENTRY_OPTIONS | {"deadline": parse_seconds})
        store = cls(place, for_fs, **entry_arguments(options))
        store.deadline_s = options.get("deadline")
        return store

    @property
    def where(self) -> str:
        return self._where

    def get(self, key: str) -> ChunkKV | None:
        """The entry; or None: absent, found wrong (see `rejections`), or the file system does not answer."""
        return self.lookup(key).kv

    def _find(self, key: str) -> Lookup:
        path = self._file(key)
        try:
            with self._answering():
                content = self._fs.cat_file(path)
            writable = numpy.frombuffer(content, dtype=numpy.uint8).copy().data
            return self._hit(key, self.packing.unpack(key, writable), len(content))
        except FileNotFoundError:
            return self._miss(key, *self.absence(key))
        except Unreachable as error:
            return self._miss(key, Miss.DOWN, str(error))
        except (UnreadableEntry, DamagedEntry) as error:
            return self._miss(key, *self._fault(key, error))

    def put(self, key: str, kv: ChunkKV) -> None:
        start = time.perf_counter()
        path = self._file(key)
        content = b"".join(self.packing.pack(key, kv))
        with self._answering():
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            if self._is_whole:
                self._fs.pipe_file(path, content)
            else:
                self._write_and_move(path, content)
        self.metrics.stored(self.label, len(content), time.perf_counter() - start)

    def _write_and_move(self, path: str, content: bytes) -> None:
        temporary = f"{path.removesuffix(SUFFIX)}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            self._fs.pipe_file(temporary, content)
            self._fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def delete(self, key: str) -> bool:
        path = self._file(key)
        with self._answering():
            try:
                if not self._fs.exists(path):
                    return False
                self._fs.rm_file(path)
            except FileNotFoundError:
                return False
        self._fs.invalidate_cache()
        return True

    def keys(self) -> Iterator[str]:
        with self._answering():
            self._fs.invalidate_cache()
            try:
                paths = self._fs.find(self._root or "/")
            except FileNotFoundError:
                return
        for path in sorted(paths):
            key = path.rpartition("/")[2].removesuffix(SUFFIX)
            # The whole path, since the folders of namespaces lie below this one.
            if is_key(key) and path == self._file(key):
                yield key

    def contains(self, key: str) -> bool:
        path = self._file(key)
        with self._answering():
            return bool(self._fs.isfile(path))

    def describe(self, key: str) -> EntryHead | None:
        path = self._file(key)
        try:
            with self._answering():
                num_bytes = int(self._fs.size(path))
                head = self._fs.cat_file(path, start=0, end=min(num_bytes, _HEAD_BYTES))
                if (needed := head_bytes(head[:8], num_bytes)) > len(head):
                    head = self._fs.cat_file(path, start=0, end=needed)
            return decode_head(key, memoryview(head), num_bytes)
        except FileNotFoundError:
            return None
        except (UnreadableEntry, DamagedEntry) as error:
            self._fault(key, error)
            return None

    def _file(self, key: str) -> str:
        check_key(key)
        return f"{self._root}/{entry_name(key)}"

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Inside, any failure but that of an absent file is ``Unreachable``: file systems raise what they
        like.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise Unreachable(f"{self.where} does not answer: {_cause(error)}") from error


def _masked(url: str) -> str:
    """The URL without the login that it may name."""
    return re.sub("//[^/@]*@", "//", url)


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text[:1].lower() + text[1:]
