"""Selectors: which rows of a spliced cache to recompute. One file per method, one registration in it."""

from kvloom.selectors.base import Selector, as_selector, select, selectors
from kvloom.selectors.cacheblend import CacheBlend
from kvloom.selectors.epic import Epic
from kvloom.selectors.full import Full
from kvloom.selectors.infoflow import InfoFlow
from kvloom.selectors.none import NoRecompute
from kvloom.selectors.random import Random

__all__ = [
    "CacheBlend",
    "Epic",
    "Full",
    "InfoFlow",
    "NoRecompute",
    "Random",
    "Selector",
    "as_selector",
    "select",
    "selectors",
]
