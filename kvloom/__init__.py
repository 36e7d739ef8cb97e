"""kvloom: reuse the KV caches of documents and repair only the rows that matter.

Public names are imported on first use, so that ``import kvloom`` and the command line's help stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Answer": "kvloom.trace",
    "CacheBlend": "kvloom.selectors",
    "ChunkKV": "kvloom.kv",
    "Compressor": "kvloom.compressors",
    "Conversation": "kvloom.conversation",
    "Document": "kvloom.prompt",
    "Epic": "kvloom.selectors",
    "Full": "kvloom.selectors",
    "InfoFlow": "kvloom.selectors",
    "InfoKV": "kvloom.compressors.infokv",
    "KVLoomError": "kvloom.errors",
    "Loom": "kvloom.loom",
    "NoRecompute": "kvloom.selectors",
    "Prompt": "kvloom.prompt",
    "PromptFormat": "kvloom.prompt",
    "Random": "kvloom.selectors",
    "Selector": "kvloom.selectors",
    "SnapKV": "kvloom.compressors.snapkv",
    "SplicedCache": "kvloom.cache",
    "Store": "kvloom.store",
    "Trace": "kvloom.trace",
    "compressors": "kvloom.compressors",
    "open_store": "kvloom.store",
    "selectors": "kvloom.selectors",
}

__all__ = [
    "Answer",
    "CacheBlend",
    "ChunkKV",
    "Compressor",
    "Conversation",
    "Document",
    "Epic",
    "Full",
    "InfoFlow",
    "InfoKV",
    "KVLoomError",
    "Loom",
    "NoRecompute",
    "Prompt",
    "PromptFormat",
    "Random",
    "Selector",
    "SnapKV",
    "SplicedCache",
    "Store",
    "Trace",
    "compressors",
    "open_store",
    "selectors",
]

if TYPE_CHECKING:
    from kvloom.cache import SplicedCache as SplicedCache
    from kvloom.compressors import Compressor as Compressor
    from kvloom.compressors import compressors as compressors
    from kvloom.compressors.infokv import InfoKV as InfoKV
    from kvloom.compressors.snapkv import SnapKV as SnapKV
    from kvloom.conversation import Conversation as Conversation
    from kvloom.errors import KVLoomError as KVLoomError
    from kvloom.kv import ChunkKV as ChunkKV
    from kvloom.loom import Loom as Loom
    from kvloom.prompt import Document as Document
    from kvloom.prompt import Prompt as Prompt
    from kvloom.prompt import PromptFormat as PromptFormat
    from kvloom.selectors import CacheBlend as CacheBlend
    from kvloom.selectors import Epic as Epic
    from kvloom.selectors import Full as Full
    from kvloom.selectors import InfoFlow as InfoFlow
    from kvloom.selectors import NoRecompute as NoRecompute
    from kvloom.selectors import Random as Random
    from kvloom.selectors import Selector as Selector
    from kvloom.selectors import selectors as selectors
    from kvloom.store import Store as Store
    from kvloom.store import open_store as open_store
    from kvloom.trace import Answer as Answer
    from kvloom.trace import Trace as Trace


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    if name not in (
        "compressors",
        "selectors",
    ):  # subpackages too: their import sets the attribute
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
