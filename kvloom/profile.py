"""Profile: which layers InfoFlow should score on one model, as `kvloom calibrate` measured it.

A profile is a JSON file named after the model's fingerprint in ``profiles/`` of kvloom's cache folder. Where
InfoFlow is asked for by name and without `layers`, the profile of the very model at hand supplies them, as an
explicit option, so that traces and recipes show them. A selector instance and an explicit `layers` are never
changed. ``KVLOOM_PROFILE=off`` leaves all profiles alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from kvloom.errors import MethodError, ProfileError
from kvloom.paths import cache_folder, write_whole
from kvloom.selectors import Selector, as_selector
from kvloom.selectors.infoflow import resolve_layers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvloom.hf import Decoder

logger = logging.getLogger(__name__)

FORMAT = "kvloom profile 1"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How well a set of layers finds the sentences that a question is about: means over prompts.

    Recall is the share of their tokens among the rows that InfoFlow would recompute; average precision (ap)
    says how high they rank whatever the ratio. Both are 1 at best.
    """

    layers: str  # as InfoFlow's option takes them
    needle_recall: float
    needle_ap: float
    multihop_recall: float
    multihop_ap: float

    @property
    def ap(self) -> float:
        """The mean over needle and multi-hop prompts."""
        return (self.needle_ap + self.multihop_ap) / 2


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The prompts that had no part in the choice: the best band of the others, the default, and the
    paper's.
    """

    samples: int
    best: Scores
    default: Scores
    paper: Scores
    gain: float  # average precision, best less default, mean over samples
    low: float  # 95 % interval of the gain, from paired bootstrap
    high: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The layers that InfoFlow should score on one model, why, and how that was measured."""

    format: str = FORMAT
    model: str
    fingerprint: str
    num_layers: int
    layers: str  # a band in shares of the depth
    why: str
    per_layer: list[Scores]  # each layer alone, over all samples
    held_out: HeldOut
    recipe: dict[str, Any]
    kvloom_version: str
    date: str  # ISO 8601

    @classmethod
    def load(cls, fingerprint: str) -> Self | None:
        """The saved profile of the model, or None; ``ProfileError`` for a damaged file or another model's."""
        path = _file(fingerprint)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ProfileError(f"profile {path} cannot be read: {error.strerror}") from None
        return cls._decode(path, raw, fingerprint)

    @classmethod
    def _decode(cls, path: Path, raw: bytes, fingerprint: str) -> Self:
        advice = "delete it, or run kvloom calibrate again"
        try:
            value = json.loads(raw)
        except ValueError:
            raise ProfileError(f"profile {path} is damaged: it is not JSON; {advice}") from None
        held = value.get("format") if isinstance(value, dict) else None
        if held != FORMAT:
            raise ProfileError(f"profile {path} has the format {held!r}, not {FORMAT!r}; {advice}")
        from pydantic import ValidationError

        try:
            profile = _adapter(cls).validate_python(value)
            resolve_layers(profile.layers, profile.num_layers)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            raise ProfileError(f"profile {path} is damaged: {where}: {fault['msg']}; {advice}") from None
        except MethodError as error:
            raise ProfileError(f"profile {path} is damaged: {error}; {advice}") from None
        if profile.fingerprint != fingerprint:
            raise ProfileError(
                f"profile {path} is of another model ({profile.model}, {profile.fingerprint[:12]}) than its "
                f"name says; {advice}"
            )
        return profile

    def save(self, path: Path | None = None) -> Path:
        """Writes the profile where `load` finds it, or to `path`, whole or not at all; returns where.

        Raises ``ProfileError`` when it cannot be written.
        """
        target = _file(self.fingerprint) if path is None else path
        try:
            if path is None:
                target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, json.dumps(self.as_dict(), ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise ProfileError(f"profile {target} cannot be written: {error.strerror}") from None
        return target

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@cache
def _adapter(cls: type[Profile]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _folder() -> Path:
    return cache_folder() / "profiles"


def _file(fingerprint: str) -> Path:
    return _folder() / f"{fingerprint}.json"


# --- what later runs use


def as_selector_for(
    decoder: Decoder, selector: Selector | str, options: Mapping[str, Any] | None = None
) -> Selector:
    """The instance given, or one of the registered name, with the layers that the model's profile has.

    Raises as `kvloom.selectors.as_selector` and `with_profile` do.
    """
    if isinstance(selector, str):
        return as_selector(selector, with_profile(selector, options or {}, decoder))
    return as_selector(selector, options)


def with_profile(name: str, options: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """The options of the method `name`, with `layers` from the model's profile where that has a say; logged.

    The fingerprint, which reads all weights, is only asked for when there is a profile of some model. Raises
    ``ProfileError`` for a profile that cannot be used, ``MethodError`` for a ``KVLOOM_PROFILE`` but "off".
    """
    switch = os.environ.get("KVLOOM_PROFILE", "")
    if switch not in ("", "off"):
        raise MethodError(f"KVLOOM_PROFILE is off or not set, got {switch!r}")
    if name != "infoflow" or "layers" in options or switch == "off" or not any(_folder().glob("*.json")):
        return dict(options)
    profile = Profile.load(decoder.fingerprint)
    if profile is None:
        return dict(options)
    logger.info(
        "layers %s from the profile calibrated on %s (kvloom calibrate)", profile.layers, profile.date
    )
    return {**options, "layers": profile.layers}


def explicit_method(text: str, decoder: Decoder) -> str:
    """A method as `kvloom eval` takes it, ``NAME`` or ``NAME:OPTION=VALUE,...``, with the profile's layers.

    They become part of the text, so that a run says them, and is not resumed under another profile.
    """
    method, at, compressor = text.partition("@")
    name, _, options = method.partition(":")
    if re.search(r"(^|,)layers=", options):
        return text
    layers = with_profile(name, {}, decoder).get("layers")
    if layers is None:
        return text
    return f"{name}:{options}{',' if options else ''}layers={layers}{at}{compressor}"
