"""Packing: how a store turns chunks into bytes and back, by its options ``codec``, ``key_file`` and
``encrypted_only``.

Any store that keeps bytes has one; what it reads does not depend on what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvloom.errors import MethodError
from kvloom.store.codecs import RAW, Coding
from kvloom.store.container import read_header
from kvloom.store.encryption import StoreKey, is_sealed, unseal
from kvloom.store.format import UnreadableEntry, decode, decode_head, encode
from kvloom.store.namespace import parse_namespace
from kvloom.store.url import parse_bool

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from kvloom.kv import ChunkKV

PACKING_OPTIONS: dict[str, Callable[[str], Any]] = {
    "codec": str,
    "key_file": str,
    "encrypted_only": parse_bool,
}
"""What a packing is made from, and how each is read from text."""

ENTRY_OPTIONS = PACKING_OPTIONS | {"namespace": parse_namespace}
"""The options of every store that packs."""


def entry_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a store is made with for those of its options; raises as `Packing.of` does."""
    return {"packing": Packing.from_options(options), "namespace": options.get("namespace")}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Entries are written by `coding`, encrypted if there is a `secret`; entries of every codec are read, and
    plain ones too unless `encrypted_only`.
    """

    coding: Coding = RAW
    secret: StoreKey | None = None
    encrypted_only: bool = False

    @classmethod
    def of(
        cls,
        *,
        codec: str = "raw",
        key_file: str | os.PathLike[str] | None = None,
        encrypted_only: bool = False,
    ) -> Self:
        """From a store's options; without a key file the key is that of ``$KVLOOM_STORE_KEY``, if any.

        Raises ``MethodError`` or ``StoreError``.
        """
        coding, secret = Coding.parse(codec), StoreKey.find(key_file)
        if encrypted_only and secret is None:
            raise MethodError("encrypted_only needs a key: give key_file=FILE or $KVLOOM_STORE_KEY")
        return cls(coding=coding, secret=secret, encrypted_only=encrypted_only)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """From those of a store's options that are for packing; raises as `of` does."""
        return cls.of(**{name: options[name] for name in PACKING_OPTIONS if name in options})

    def pack(self, key: str, kv: ChunkKV) -> list[bytes | memoryview]:
        """The entry's bytes, in pieces; raises ``StoreError`` for a chunk that the codec cannot hold."""
        pieces = encode(key, kv, self.coding)
        return pieces if self.secret is None else self.secret.seal(key, kv, str(self.coding), pieces)

    def unpack(self, key: str, content: memoryview) -> ChunkKV:
        """The chunk whose entry is `content` (writable bytes), of the dtype it had.

        Every byte has been checked: raises ``DamagedEntry``, or ``UnreadableEntry`` for an entry that may be
        right but is not for this store: of a later version, another key, a codec that is not installed, or
        in clear where only encrypted ones count.
        """
        header = read_header(content)
        if not is_sealed(header):
            if self.encrypted_only:
                raise UnreadableEntry("is not encrypted, and the store takes no other (encrypted_only)")
            return decode(key, content, header)
        decode_head(key, content, len(content))
        return decode(key, unseal(content, header, self.secret))
