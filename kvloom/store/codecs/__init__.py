"""How keys and values are written: bit by bit, or smaller within a stated error."""

from kvloom.store.codecs.base import Codec, Kind, NotCodable, Spec, codecs
from kvloom.store.codecs.coding import RAW, Coding

__all__ = ["RAW", "Codec", "Coding", "Kind", "NotCodable", "Spec", "codecs"]
