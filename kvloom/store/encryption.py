"""Encryption at rest: whole chunk files under AES-256-GCM, each in a file of its own that says which key.

What the outer file says in clear (the chunk's key, model, position, number of tokens, codec, key id, nonce)
is authenticated with the content, so none of it can be exchanged unseen.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from kvloom.errors import MethodError, StoreError
from kvloom.store.base import fields
from kvloom.store.container import (
    CODED,
    FORMAT,
    DamagedEntry,
    UnreadableEntry,
    check_contents,
    check_cover,
    metadata_fields,
    read_extents,
    require,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvloom.kv import ChunkKV
    from kvloom.store.container import Header

ENVIRONMENT = "KVLOOM_STORE_KEY"
CIPHER = "aes-256-gcm"
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
MAX_BYTES = 2**31 - 1 - TAG_BYTES  # of one entry: the cipher library's limit

_KEY_TEXT = re.compile(r"[0-9a-fA-F]{64}")
_NONCE = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}")


@dataclass(frozen=True)
class StoreKey:
    """A secret of 32 bytes. Raises ``MethodError`` for another length, and without the cipher's package."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise MethodError(f"a store's key has {KEY_BYTES} bytes, got {len(self.secret)}")
        _aesgcm(self.secret)

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """The key written as 64 hexadecimal characters; `where` it was found, for the message."""
        if _KEY_TEXT.fullmatch(text.strip()) is None:
            raise StoreError(
                f"{where} is not a key of 64 hexadecimal characters; make one with 'openssl rand -hex 32'"
            )
        return cls(bytes.fromhex(text.strip()))

    @classmethod
    def find(cls, key_file: str | os.PathLike[str] | None) -> Self | None:
        """The key in the file, else in ``$KVLOOM_STORE_KEY``, else None.

        Raises ``StoreError`` for a file that cannot be read and for what is no key.
        """
        if key_file is None:
            text = os.environ.get(ENVIRONMENT)
            return None if text is None else cls.parse(text, f"${ENVIRONMENT}")
        try:
            text = Path(key_file).expanduser().read_text(encoding="ascii")
        except UnicodeDecodeError:
            text = ""
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise StoreError(
                f"cannot read the key file {key_file}: {cause}; name one that is there"
            ) from error
        return cls.parse(text, f"the key file {key_file}")

    @property
    def id(self) -> str:
        """16 hexadecimal characters that tell keys apart and give none away."""
        return hashlib.sha256(b"".join(fields([b"kvloom-store-key", self.secret]))).hexdigest()[:16]

    def seal(
        self, key: str, kv: ChunkKV, codec: str, file: Sequence[bytes | memoryview]
    ) -> list[bytes | memoryview]:
        """The encrypted file of the chunk `kv` whose plain file is `file`; never the same bytes twice."""
        content = b"".join(file)
        if len(content) > MAX_BYTES:
            raise StoreError(
                f"an entry of {len(content):,} bytes is beyond the {MAX_BYTES:,} that can be encrypted; "
                "index with smaller chunks or another codec"
            )
        nonce = os.urandom(NONCE_BYTES)
        metadata = {
            "fingerprint": kv.fingerprint,
            "format": FORMAT,
            "key": key,
            "num_tokens": str(kv.num_tokens),
            "start": str(kv.start),
            "version": str(CODED),
            "codec": codec,
            "cipher": CIPHER,
            "key_id": self.id,
            "nonce": nonce.hex(),
        }
        sealed = _aesgcm(self.secret).encrypt(nonce, content, _associated(metadata))
        return write(metadata, {"sealed": torch.frombuffer(bytearray(sealed), dtype=torch.uint8)})


def is_sealed(header: Header) -> bool:
    """True if the file says that it is encrypted."""
    return "cipher" in header[0]["__metadata__"]


def unseal(content: memoryview, read: Header, secret: StoreKey | None) -> memoryview:
    """The plain file in an encrypted one, whose header was `read`, in memory of its own.

    Raises ``DamagedEntry`` for one that was changed, ``UnreadableEntry`` where it needs another key.
    """
    header, data_begin = read
    metadata = header["__metadata__"]
    extents = read_extents(header, data_begin)
    require(set(extents) == {"sealed"}, "its tensors are not those of an encrypted entry")
    sealed = extents["sealed"]
    require(sealed.dtype == "U8" and len(sealed.shape) == 1, "its sealed content is not a list of bytes")
    check_cover(extents.values(), data_begin, len(content))
    check_contents(metadata, [sealed], content)
    require(_NONCE.fullmatch(metadata["nonce"]) is not None, f"its nonce is {metadata['nonce']!r}")
    if metadata["cipher"] != CIPHER:
        raise UnreadableEntry(f"is encrypted by {metadata['cipher']!r}; update kvloom to read it")
    if secret is None or metadata["key_id"] != secret.id:
        other, which = ("", "it") if secret is None else (f", not with {secret.id}", "the first")
        raise UnreadableEntry(
            f"is encrypted with the key {metadata['key_id']}{other}; give {which} as key_file=FILE or "
            f"${ENVIRONMENT}"
        )
    from cryptography.exceptions import InvalidTag

    nonce = bytes.fromhex(metadata["nonce"])
    try:
        content = memoryview(content[sealed.begin : sealed.end])
        plain = _aesgcm(secret.secret).decrypt(nonce, content, _associated(metadata))
    except InvalidTag:
        raise DamagedEntry("is damaged: it was changed after it was encrypted") from None
    return memoryview(bytearray(plain))


def _associated(metadata: Mapping[str, str]) -> bytes:
    """What the cipher authenticates beside the content: all metadata but the checksum."""
    return b"".join(fields(metadata_fields(metadata)))


def _aesgcm(secret: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise MethodError(
            "encryption needs the package cryptography: pip install 'kvloom[crypto]', or name no key"
        ) from None
    return AESGCM(secret)
