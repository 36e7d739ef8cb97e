"""Lookup: what became of one request for an entry, with the reason where it missed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.kv import ChunkKV


class Miss(StrEnum):
    """Why there is no entry; the more telling first, which is how several tiers' reasons become one."""

    DAMAGED = "damaged"  # it was found wrong, now or earlier
    DOWN = "tier down"  # the place did not answer, or is not asked for a while because it did not
    DEADLINE = "deadline"  # waiting longer would cost more than computing it again
    UNREADABLE = "unreadable"  # it is there, and cannot be read from here
    EVICTED = "evicted"  # it made room for others
    DELETED = "deleted"  # someone asked for that
    VANISHED = "vanished"  # it went without a record: its file was removed from outside
    UNKNOWN = "no record"  # it is not there, and this store does not know what once was
    OTHER_HEADER = "other header"  # the same tokens are there behind another header
    OTHER_COMPRESSOR = "other compressor"  # ... compressed otherwise
    OTHER_MODEL = "other fingerprint"  # ... computed by another model
    NEVER_STORED = "never stored"


class DamagedEntry(Exception):
    """The bytes are not what was written; the message completes "the entry ..."."""


class UnreadableEntry(Exception):
    """The bytes may be right but cannot be used here, so they stay; the message completes "the entry ..."."""


class Kin(NamedTuple):
    """How an entry of the same tokens was computed."""

    fingerprint: str
    compressor: str


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A hit has `kv`, a miss has `reason`; `seconds` is what the request took in all."""

    key: str
    tier: str  # the store that answered, by the name of its scheme
    kv: ChunkKV | None = None
    reason: Miss | None = None
    detail: str = ""  # completes the reason, as in "its checksum is not that of its contents"
    num_bytes: int = 0  # read
    seconds: float = 0.0
    tried: tuple[Lookup, ...] = ()  # tiers that missed before this one answered

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        if self.reason is not None:
            return f"miss ({self.reason}{detail})"
        return f"hit ({self.tier}, {self.num_bytes:,} bytes in {self.seconds * 1000:.1f} ms)"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; without the KV."""
        return {
            "key": self.key,
            "hit": self.kv is not None,
            "tier": self.tier,
            "reason": None if self.reason is None else self.reason.value,
            "detail": self.detail,
            "num_bytes": self.num_bytes,
            "seconds": self.seconds,
            "tried": [earlier.as_dict() for earlier in self.tried],
        }


def content_digest(token_ids: Tensor) -> str:
    """SHA-256 of the tokens (T,) alone."""
    return hashlib.sha256(token_ids.detach().cpu().numpy().astype("<i8").tobytes()).hexdigest()


def most_telling(misses: tuple[Lookup, ...]) -> Lookup:
    """The miss with the reason that says most about why nothing was found."""
    order = list(Miss)
    return min(misses, key=lambda miss: order.index(miss.reason or Miss.NEVER_STORED))
