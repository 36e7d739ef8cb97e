"""Indexing by a local Ray cluster of two workers."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tiny_folder import save_tiny_model

from kvloom import ray_cluster, ray_indexing
from kvloom.errors import ClusterError, DocumentError, MethodError, ModelError, StoreError
from kvloom.indexing import IndexedDocument, index_documents
from kvloom.loom import Loom
from kvloom.prompt import Document, PromptFormat
from kvloom.ray_cluster import shared_url
from kvloom.ray_indexing import TRIES, groups, index_with_ray
from kvloom.store import DiskStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
DOCUMENTS = [
    Document(f"Barge {number} carried {number * 7} tons of stone up the river.", id=f"d{number}")
    for number in range(16)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine with two processors, which the calls below use as it is."""
    with ray_cluster.connected(ray_cluster.import_ray(), "local", 2):
        yield
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("??/*") if path.is_file()}


@pytest.mark.usefixtures("cluster")
def test_two_workers_store_what_one_process_would(model: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = index_with_ray(
        str(model),
        DOCUMENTS,
        store=f"disk:{tmp_path}/ray",
        workers=2,
        source="barges.jsonl",
        on_progress=lambda *done: progress.append(done),
    )
    assert (report.failed, report.workers, report.restarts) == ([], 2, 0)
    assert (progress[0], progress[-1]) == ((0, 16), (16, 16))
    loom = Loom.from_pretrained(str(model), store=f"disk:{tmp_path}/one")
    alone = []
    for group in groups(DOCUMENTS, 2):  # packed as the workers pack
        alone += index_documents(loom, [DOCUMENTS[place] for place in group])
    assert [found.keys for found in report.indexed] == [found.keys for found in alone]
    assert files(tmp_path / "ray") == files(tmp_path / "one")
    stored = DiskStore(tmp_path / "ray").documents.all()
    assert {document.id for document in stored} == {document.id for document in DOCUMENTS}
    assert {document.source for document in stored} == {"barges.jsonl"}

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray").glob("??/*")}
    again = index_with_ray(str(model), DOCUMENTS, store=f"disk:{tmp_path}/ray", workers=1)
    assert {found.status for found in again.indexed} == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "ray").glob("??/*")} == before


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_is_replaced_and_nothing_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    start_one = ray_indexing._Crew.start_one

    def noted(crew: Any) -> tuple[Any, Any]:
        started.append(start_one(crew))
        return started[-1]

    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if done and not killed:
            killed.append(ray.get(started[0][1]))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(ray_indexing._Crew, "start_one", noted)
    report = index_with_ray(str(model), DOCUMENTS, store=f"disk:{tmp_path}", workers=2, on_progress=kill)
    assert [found.id for found in report.indexed] == [document.id for document in DOCUMENTS]
    assert (report.failed, report.restarts >= 1) == ([], True)
    store = DiskStore(tmp_path)
    assert len(store.documents.all()) == 16
    assert store.verify() == []
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.usefixtures("cluster")
def test_documents_that_always_fail_are_reported_and_the_others_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(ray_indexing._Worker):
        """Without a model, which takes most of the time to start."""

        def start(self, recipe: Any) -> int:
            return os.getpid()

        def index(self, documents: list[Document]) -> Any:
            texts = [document.text for document in documents]
            if "poison" in texts:
                os._exit(1)
            if "bug" in texts:
                raise ZeroDivisionError("a bug")
            failed = {place: "it is bad" for place, text in enumerate(texts) if text == "bad"}
            found = {
                place: IndexedDocument(id=document.id, keys=(), num_tokens=1)
                for place, document in enumerate(documents)
                if place not in failed
            }
            return found, failed

    monkeypatch.setattr(ray_indexing, "_Worker", Mortal)
    bad = [Document("poison", id="deadly"), Document("bad"), Document("bug", id="buggy")]
    documents = [*DOCUMENTS[:6], *bad, *DOCUMENTS[6:9]]
    report = index_with_ray("m", documents, store=f"disk:{tmp_path}", workers=1)
    assert [found.id for found in report.indexed] == [f"d{number}" for number in range(9)]
    assert [(failure.id, failure.cause, failure.attempts) for failure in report.failed] == [
        ("deadly", "its worker died each time", TRIES),
        ("document 7", "it is bad", TRIES),
        ("buggy", "ZeroDivisionError: a bug", TRIES),
    ]
    assert report.restarts == TRIES


def test_a_worker_finds_the_document_that_fails(model: Path, tmp_path: Path) -> None:
    options = {"prompt_format": PromptFormat(chunk_tokens=4096)}
    recipe = ray_indexing._Recipe(model=str(model), store=f"disk:{tmp_path}", options=options, source="")
    worker = ray_indexing._Worker()
    assert worker.start(recipe) == os.getpid()
    found, failed = worker.index([*DOCUMENTS[:2], Document("word " * 3000), DOCUMENTS[2]])
    assert {place: document.id for place, document in found.items()} == {0: "d0", 1: "d1", 3: "d2"}
    assert list(failed) == [2]
    assert "model takes 2,048: give a smaller chunk_tokens" in failed[2]
    with pytest.raises(
        StoreError, match=r"does not see the store's folder .* of this machine; name one that"
    ):
        worker.start(replace(recipe, marks=[tmp_path / "00" / "no such file"]))


@pytest.mark.usefixtures("cluster")
def test_what_no_worker_can_do_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; it is not a transformers model"):
        index_with_ray(str(tmp_path), DOCUMENTS, store=f"disk:{tmp_path}/kv")


def test_wrong_use_is_refused_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("memory:", "memory:1GiB,memory:"):
        with pytest.raises(MethodError, match="is in one process's memory; name one that workers share"):
            index_with_ray("m", DOCUMENTS, store=url)
    with pytest.raises(MethodError, match="workers must be at least 1, got 0"):
        index_with_ray("m", DOCUMENTS, store=f"disk:{tmp_path}", workers=0)
    with pytest.raises(DocumentError, match="two documents have the id 'a'; give each its own"):
        index_with_ray("m", [Document("x", "a"), Document("y", "a")], store=f"disk:{tmp_path}")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match=r"nobody answers at the Ray address '127\.0\.0\.1:1': "):
        index_with_ray("m", DOCUMENTS, store=f"disk:{tmp_path}", address="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"Ray is not installed; run pip install 'kvloom\[ray\]'"):
        index_with_ray("m", DOCUMENTS, store=f"disk:{tmp_path}")


def test_workers_get_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shared_url("disk:kv?quota=1GiB") == f"disk:{tmp_path}/kv?quota=1GiB"
    assert shared_url("memory:,disk:a%3Fb,redis://h:1/0") == f"memory:,disk:{tmp_path}/a%3Fb,redis://h:1/0"
    with pytest.raises(MethodError, match="give its URL, not DiskStore"):
        shared_url(DiskStore(tmp_path / "kv"))  # type: ignore[arg-type]


def test_groups_are_small_and_hold_each_document_once() -> None:
    assert list(groups(DOCUMENTS, 2)) == [[2 * place, 2 * place + 1] for place in range(8)]
    long = [Document("x" * 20_000)] * 3 + [Document("y")]
    assert list(groups(long, 1)) == [[0], [1], [2], [3]]
    many = [Document("x" * 1000)] * 1000
    assert {len(group) for group in groups(many, 1)} <= {32, 1000 % 32}
