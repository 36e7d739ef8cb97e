"""Files of a store's folder: read without waiting, written so that they are whole or absent."""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from typing import TYPE_CHECKING

import numpy

from kvloom.store.format import DamagedEntry, decode_head, head_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import BufferedReader
    from pathlib import Path


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """The file, opened without waiting for anyone; ``DamagedEntry`` for a folder, a pipe or a device in its
    place.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedEntry("it is not a regular file")
    return open(descriptor, "rb")


def read_entry(key: str, path: Path) -> memoryview:
    """The file's bytes in memory of their own: a mapped file that is cut short would kill the process.

    The header is checked first, so that a file which only claims to be large takes no memory. The file is
    opened once: evicted meanwhile, it stays readable to its end, since POSIX keeps an unlinked file for those
    who have it open. The time of last use is noted on the file itself.
    """
    with open_regular(path) as file:
        head, num_bytes = _head_of(file)
        decode_head(key, head, num_bytes)
        status = os.fstat(file.fileno())
        file.seek(0)
        content = numpy.empty(num_bytes, dtype=numpy.uint8).data
        num_read = file.readinto(content)
        with contextlib.suppress(OSError):  # neither ours nor writable: it is still served
            os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
        return content[:num_read]


def read_head(path: str | os.PathLike[str]) -> tuple[memoryview, int]:
    """The file's bytes up to the end of its header, and the size of the whole."""
    with open_regular(path) as file:
        return _head_of(file)


def _head_of(file: BufferedReader) -> tuple[memoryview, int]:
    num_bytes = os.fstat(file.fileno()).st_size
    beginning = file.read(8)
    rest = file.read(max(0, head_bytes(beginning, num_bytes) - len(beginning)))
    return memoryview(beginning + rest), num_bytes


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """`path` holds the pieces, durably, mode 0600; after an exception before that, nothing has changed."""
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """The names in the folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def listing(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """The folder's entries by name; none where there is no folder."""
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def cause(error: Exception) -> str:
    """What went wrong, as it stands in the middle of a sentence."""
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return text[:1].lower() + text[1:]
