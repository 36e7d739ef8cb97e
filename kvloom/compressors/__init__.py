"""Compressors: which rows of a cache stay."""

from kvloom.compressors.base import Compressor, Growing, as_compressor, compressors
from kvloom.compressors.compress import Compression, compress
from kvloom.compressors.decoding import Decoding

__all__ = ["Compression", "Compressor", "Decoding", "Growing", "as_compressor", "compress", "compressors"]
