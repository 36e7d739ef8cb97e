"""Counters and histograms of stores, for Prometheus; without ``prometheus-client`` (extra ``metrics``)
nothing is counted and nothing fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.store.base import Store
    from kvloom.store.lookup import Lookup

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the histograms' buckets: a small chunk from memory to a large one from afar."""

BREAKER_STATES = ("closed", "half-open", "open")
"""The gauge's value is the place in this list."""


class StoreMetrics:
    """Counts nothing: what a store has until `observe` gives it something else."""

    def looked_up(self, found: Lookup) -> None:
        """One request was answered by the store that `found.tier` names."""

    def stored(self, tier: str, num_bytes: int, seconds: float) -> None:
        """One entry was written."""

    def evicted(self, tier: str, reason: str) -> None:
        """One entry made room, or was freed: `reason` is "quota", "memory" or "unused"."""

    def damaged(self, tier: str) -> None:
        """One entry was found wrong."""

    def breaker(self, tier: str, state: str) -> None:
        """The tier's breaker is now in `state`, one of `BREAKER_STATES`."""


class PrometheusMetrics(StoreMetrics):
    """Counts into a registry of prometheus_client; one object for each registry."""

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def counter(name: str, what: str, *labels: str) -> Any:
            return Counter(f"kvloom_store_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str) -> Any:
            return Histogram(f"kvloom_store_{name}", what, ("tier",), buckets=SECONDS, registry=registry)

        self._lookups = counter("lookups", "Requests for an entry.", "tier", "outcome")
        self._read_bytes = counter("read_bytes", "Bytes of entries found.", "tier")
        self._read_seconds = histogram("read_seconds", "Seconds until an entry was found.")
        self._miss_seconds = histogram("miss_seconds", "Seconds until an entry was not found.")
        self._written_bytes = counter("written_bytes", "Bytes of entries written.", "tier")
        self._write_seconds = histogram("write_seconds", "Seconds until an entry was written.")
        self._evictions = counter("evictions", "Entries that made room or were freed.", "tier", "reason")
        self._damaged = counter("damaged", "Entries found wrong.", "tier")
        self._breaker = Gauge(
            "kvloom_store_breaker_state",
            "0 closed, 1 half-open, 2 open: the tier is not asked.",
            ("tier",),
            registry=registry,
        )

    def looked_up(self, found: Lookup) -> None:
        self._lookups.labels(found.tier, found.reason.value if found.reason else "hit").inc()
        if found.kv is None:
            self._miss_seconds.labels(found.tier).observe(found.seconds)
        else:
            self._read_bytes.labels(found.tier).inc(found.num_bytes)
            self._read_seconds.labels(found.tier).observe(found.seconds)

    def stored(self, tier: str, num_bytes: int, seconds: float) -> None:
        self._written_bytes.labels(tier).inc(num_bytes)
        self._write_seconds.labels(tier).observe(seconds)

    def evicted(self, tier: str, reason: str) -> None:
        self._evictions.labels(tier, reason).inc()

    def damaged(self, tier: str) -> None:
        self._damaged.labels(tier).inc()

    def breaker(self, tier: str, state: str) -> None:
        self._breaker.labels(tier).set(BREAKER_STATES.index(state))


def observe(store: Store, registry: Any = None) -> StoreMetrics:
    """The store and its tiers count into `registry`, by default prometheus_client's own; several stores may
    share what is returned through `Store.use_metrics`. Without prometheus_client, nothing is counted.
    """
    try:
        import prometheus_client
    except ImportError:
        return store.metrics
    metrics = PrometheusMetrics(prometheus_client.REGISTRY if registry is None else registry)
    store.use_metrics(metrics)
    return metrics
