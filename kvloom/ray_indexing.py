"""Documents indexed by a Ray cluster: a worker with the model on each device, all of them into one store.

The driver loads no model. It hands documents out in small groups and takes back what became of them; what a
worker had when it died goes to another, one document at a time, so that one that kills workers is found.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvloom.errors import ClusterError, KVLoomError, MethodError, StoreError
from kvloom.indexing import IndexedDocument, check_ids, index_documents
from kvloom.prompt import Document, as_documents
from kvloom.ray_cluster import connected, everywhere, import_ray, marked, sentence, shared_url, touch
from kvloom.store.base import in_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvloom.compressors import Compressor
    from kvloom.prompt import PromptFormat

logger = logging.getLogger(__name__)

TRIES = 3  # of a document, and of starting a worker
GROUP_CHARS = 32_000  # of the documents handed out together: some forwards, and little to do again
GROUP_DOCUMENTS = 64
WAIT_S = 60.0  # without any answer, after which the log says what is waited for


@dataclass(frozen=True, kw_only=True)
class FailedDocument:
    """A document that could not be indexed, and why."""

    id: str  # or "document 7", counted from 0, for one without
    cause: str
    attempts: int


@dataclass(frozen=True, kw_only=True)
class RayReport:
    """What became of the documents, each list in their order."""

    indexed: list[IndexedDocument]
    failed: list[FailedDocument]
    workers: int
    restarts: int  # of workers that died


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """All that a worker needs to make its Loom."""

    model: str
    store: str
    options: dict[str, Any]
    source: str
    marks: list[Path] = field(default_factory=list)  # files that a worker sees if its folders are ours


class _Worker:
    """Runs on the cluster: a Loom, and the documents it is given."""

    def start(self, recipe: _Recipe) -> int:
        """The model is loaded and the store open; the id of the process."""
        for mark in recipe.marks:
            if not mark.exists():
                raise StoreError(
                    f"{socket.gethostname()} does not see the store's folder {mark.parent.parent} of this "
                    "machine; name one that all machines share, or a redis: or fsspec: store"
                )
        from kvloom.loom import Loom

        self._source = recipe.source
        self._loom = Loom.from_pretrained(recipe.model, store=recipe.store, **recipe.options)
        return os.getpid()

    def index(self, documents: list[Document]) -> tuple[dict[int, IndexedDocument], dict[int, str]]:
        """The documents by their places: those that were indexed, and the causes of the others."""
        try:
            found = index_documents(self._loom, documents, source=self._source)
            failed: dict[int, str] = {}
        except Exception as error:
            if len(documents) == 1:
                return {}, {0: sentence(error)}
            alone = [self.index([document]) for document in documents]
            found = {place: done[0] for place, (done, _) in enumerate(alone) if done}
            failed = {place: causes[0] for place, (_, causes) in enumerate(alone) if causes}
        self._loom.store.flush()
        return found if isinstance(found, dict) else dict(enumerate(found)), failed


def index_with_ray(
    model: str,
    documents: Sequence[Document | str],
    *,
    store: str,
    namespace: str | None = None,
    address: str = "local",
    workers: int | None = None,
    source: str = "",
    device: str | None = None,
    dtype: str | None = None,
    prompt_format: PromptFormat | None = None,
    chunk_compressor: Compressor | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RayReport:
    """Every document is indexed as by `kvloom.indexing.index_documents`, or named in `failed` with the cause.

    `address` is a Ray cluster's, ``auto``, or ``local``: one of this machine, for this call; a cluster
    that the process is connected to already is used as it is. There is a worker for each GPU of the
    cluster, or on one without GPUs, or with device "cpu", one, or as many as `workers` says. `store` is a
    URL that all machines can open, `namespace` the tenant's part of it; `model` is a hub name or a folder
    that all machines see. Documents that were indexed before are skipped. A document is tried three
    times, on another worker if there is one.
    `on_progress(done, total)` counts documents. Raises ``ClusterError`` for a cluster that cannot be reached
    or whose workers do not start, and what a worker raises that cannot make its model or store.
    """
    given = as_documents(documents)
    check_ids(given)
    ray = import_ray()
    if workers is not None and workers < 1:
        raise MethodError(f"workers must be at least 1, got {workers}")
    url = in_namespace(shared_url(store), namespace)
    options = {
        "dtype": dtype,
        "device": device,
        "prompt_format": prompt_format,
        "chunk_compressor": chunk_compressor,
    }
    recipe = _Recipe(model=everywhere(model), store=url, options=options, source=source)
    with connected(ray, address, workers), marked(url) as marks:
        crew = _Crew(ray, replace(recipe, marks=marks), workers)
        try:
            return _Run(crew, given, on_progress).index()
        finally:
            crew.end()


class _Crew:
    """The workers. One that died is started anew, up to `TRIES` times without success."""

    def __init__(self, ray: Any, recipe: _Recipe, workers: int | None) -> None:
        self.ray = ray
        self.recipe = recipe
        total = ray.cluster_resources()
        num_gpus = 0 if recipe.options["device"] == "cpu" else int(total.get("GPU", 0))
        self.size = workers or max(1, num_gpus)
        if num_gpus and self.size > num_gpus:
            raise MethodError(
                f"{self.size} workers need a GPU each, and the cluster has {num_gpus}; ask for fewer"
            )
        if num_gpus and recipe.options["device"] is None:
            self.recipe = replace(recipe, options=recipe.options | {"device": "cuda"})
        self.needs = {"num_gpus": 1 if num_gpus else 0, "num_cpus": self._cpus_each()}
        self.restarts = 0
        self.actors: list[Any] = []

    def _cpus_each(self) -> int:
        """Processors of a worker: those of the smallest machine, shared by the workers that it may get."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        cpus = [int(resources["CPU"]) for resources in nodes if resources.get("CPU", 0) >= 1]
        if not cpus:
            raise ClusterError("the Ray cluster has no processor to give; start a node with --num-cpus")
        return max(1, min(cpus) // -(-self.size // len(cpus)))

    def start_one(self) -> tuple[Any, Any]:
        """A new actor, and what it will answer once its model is loaded."""
        for mark in self.recipe.marks:
            touch(mark)
        actor = self.ray.remote(_Worker).options(max_restarts=0, **self.needs).remote()
        self.actors.append(actor)
        return actor, actor.start.remote(self.recipe)

    def end(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)


@dataclass
class _Task:
    """What a worker is doing: starting, with no places, or documents."""

    actor: Any
    places: list[int]
    start: int = 0  # how many times this worker was started


class _Run:
    """One call of `index_with_ray`."""

    def __init__(
        self, crew: _Crew, documents: list[Document], on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.crew = crew
        self.documents = documents
        self.tell = on_progress or (lambda done, total: None)
        self.queue: deque[list[int]] = deque(groups(documents, crew.size))
        self.attempts = [0] * len(documents)
        self.indexed: dict[int, IndexedDocument] = {}
        self.failed: dict[int, str] = {}
        self.running: dict[Any, _Task] = {}
        self.idle: list[Any] = []

    def index(self) -> RayReport:
        ray, total = self.crew.ray, len(self.documents)
        self.tell(0, total)
        for _ in range(min(self.crew.size, len(self.queue))):
            self._start(1)
        while len(self.indexed) + len(self.failed) < total:
            ready, _ = ray.wait(list(self.running), timeout=WAIT_S)
            if not ready:
                logger.warning("no answer of a Ray worker for %.0f s; the cluster may have no room", WAIT_S)
            for answer in ready:
                self._take(answer)
            while self.idle and self.queue:
                self._hand_out(self.idle.pop(), self.queue.popleft())
            self.tell(len(self.indexed) + len(self.failed), total)
        return RayReport(
            indexed=[self.indexed[place] for place in sorted(self.indexed)],
            failed=[
                FailedDocument(
                    id=self.documents[place].id or f"document {place}",
                    cause=self.failed[place],
                    attempts=self.attempts[place],
                )
                for place in sorted(self.failed)
            ],
            workers=self.crew.size,
            restarts=self.crew.restarts,
        )

    def _start(self, start: int) -> None:
        actor, answer = self.crew.start_one()
        self.running[answer] = _Task(actor, [], start)

    def _hand_out(self, actor: Any, places: list[int]) -> None:
        for place in places:
            self.attempts[place] += 1
        answer = actor.index.remote([self.documents[place] for place in places])
        self.running[answer] = _Task(actor, places)

    def _take(self, answer: Any) -> None:
        """What a worker has answered, or its death, is accounted for."""
        task = self.running.pop(answer)
        try:
            result = self.crew.ray.get(answer)
        except self.crew.ray.exceptions.RayTaskError as error:
            if not task.places:  # it will be the same with every worker
                raise _own(error) from error
            self._failed(dict.fromkeys(task.places, sentence(error)))
            self.idle.append(task.actor)
        except self.crew.ray.exceptions.RayError as error:
            self._died(task, error)
        else:
            if task.places:
                done, causes = result
                self.indexed |= {task.places[place]: found for place, found in done.items()}
                self._failed({task.places[place]: cause for place, cause in causes.items()})
            self.idle.append(task.actor)

    def _failed(self, causes: dict[int, str]) -> None:
        """The documents come again, alone, or are given up."""
        for place, cause in causes.items():
            if self.attempts[place] >= TRIES:
                self.failed[place] = cause
            else:
                self.queue.append([place])

    def _died(self, task: _Task, error: Exception) -> None:
        logger.warning("a Ray worker died and is started anew: %s", sentence(error))
        self._failed(dict.fromkeys(task.places, "its worker died each time"))
        if task.start >= TRIES:
            if not self.running and not self.idle:
                raise ClusterError(f"no Ray worker stays alive: {sentence(error)}") from error
            return
        self.crew.restarts += 1
        self._start(task.start + 1)


def groups(documents: Sequence[Document], workers: int) -> Iterator[list[int]]:
    """Places of consecutive documents that are handed out together; of few documents, several groups for
    each worker.
    """
    group: list[int] = []
    num_chars, most = 0, min(GROUP_DOCUMENTS, max(1, len(documents) // (4 * workers)))
    for place, document in enumerate(documents):
        if group and (num_chars + len(document.text) > GROUP_CHARS or len(group) == most):
            yield group
            group, num_chars = [], 0
        group.append(place)
        num_chars += len(document.text)
    if group:
        yield group


def _own(error: Any) -> KVLoomError:
    """The worker's exception, as itself if it is one of ours."""
    origin = error.cause
    return (
        origin
        if isinstance(origin, KVLoomError)
        else ClusterError(f"a Ray worker cannot start: {sentence(error)}")
    )
