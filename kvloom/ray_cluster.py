"""A Ray cluster: being connected to it, and what all its machines must be able to reach."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from kvloom.errors import ClusterError, KVLoomError, MethodError, StoreError
from kvloom.store import open_store
from kvloom.store.base import stores
from kvloom.store.disk import DiskStore
from kvloom.store.files import cause
from kvloom.store.tiers import TieredStore
from kvloom.store.url import split_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

REACH_S = 10.0  # for the cluster's address to answer


def shared_url(url: str) -> str:
    """The store's URL with folders absolute; raises ``MethodError`` for a store that ends with a process."""
    if not isinstance(url, str):
        raise MethodError(f"workers open the store themselves: give its URL, not {type(url).__name__}")
    parts = split_tiers(url.removeprefix("tiers:"), stores)
    if all(part.partition(":")[0] == "memory" for part in parts):
        raise MethodError(
            f"store {url!r} is in one process's memory; name one that workers share, such as disk:PATH"
        )
    return ",".join(_absolute(part) if part.startswith("disk:") else part for part in parts)


def _absolute(url: str) -> str:
    place, mark, options = url.removeprefix("disk:").partition("?")
    path = str(Path(unquote(place)).expanduser().absolute()) if place else ""
    return f"disk:{quote(path, safe='/: ')}{mark}{options}"


def everywhere(model: str) -> str:
    """The model's folder as an absolute path; a hub name as it is."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if folder.is_dir() else model


def import_ray() -> Any:
    """Ray; raises ``ClusterError`` where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unasked
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its new behaviour, without its warning
    try:
        import ray
    except ImportError:
        raise ClusterError("Ray is not installed; run pip install 'kvloom[ray]'") from None
    return ray


@contextmanager
def connected(ray: Any, address: str, workers: int | None) -> Iterator[None]:
    """Inside, the process is connected to the cluster."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    _check_reachable(address)
    if address == "local":
        options |= {
            "num_cpus": max(workers or 1, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": 256 * 2**20,  # documents pass through it, never KV
        }
    try:
        ray.init(address=address, **options)
    except Exception as error:  # Ray raises nearly every type there is
        raise ClusterError(f"cannot use the Ray cluster {address!r}: {sentence(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises ``ClusterError`` for a HOST:PORT where nobody listens, for which Ray itself waits minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"nobody answers at the Ray address {address!r}: {error}") from None


@contextmanager
def marked(url: str) -> Iterator[list[Path]]:
    """Inside, each folder of the store holds a file by which a worker knows that it is this one. The sweep
    takes it if this process is killed.
    """
    opened = open_store(url)
    parts = opened.parts if isinstance(opened, TieredStore) else [opened]
    name = f"{'0' * 64}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
    marks = [part.path / "00" / name for part in parts if isinstance(part, DiskStore)]
    try:
        yield marks
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def touch(mark: Path) -> None:
    """The mark is there, whatever has swept it."""
    try:
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.touch(mode=0o600)
    except OSError as error:
        raise StoreError(f"cannot write to {mark.parent.parent}: {cause(error)}; make it writable") from error


def sentence(error: Any) -> str:
    """One line of what happened."""
    origin = getattr(error, "cause", None) or error
    text = " ".join(str(origin).partition("\n")[0].split()) or "no reason given"
    named = text if isinstance(origin, KVLoomError) else f"{type(origin).__name__}: {text}"
    return named if len(named) <= 300 else f"{named[:299]}…"
