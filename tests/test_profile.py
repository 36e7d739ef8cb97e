from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tiny_models import DOCUMENTS, QUESTION, loom_of

from kvloom.errors import MethodError, ProfileError
from kvloom.profile import HeldOut, Profile, Scores, as_selector_for, explicit_method, with_profile
from kvloom.selectors import CacheBlend, InfoFlow

if TYPE_CHECKING:
    from pathlib import Path

    from kvloom.loom import Loom

SCORES = Scores(layers="0", needle_recall=0.5, needle_ap=0.25, multihop_recall=1.0, multihop_ap=0.75)
BAND = "0-0.1"


def profile_of(fingerprint: str, layers: str = BAND) -> Profile:
    return Profile(
        model="tiny",
        fingerprint=fingerprint,
        num_layers=3,
        layers=layers,
        why="it was measured",
        per_layer=[SCORES] * 3,
        held_out=HeldOut(samples=2, best=SCORES, default=SCORES, paper=SCORES, gain=0.1, low=0.0, high=0.2),
        recipe={"samples": 4, "text": "ab"},
        kvloom_version="0.1.0",
        date="2026-12-01",
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVLOOM_PROFILE", raising=False)
    return tmp_path / "cache"


class Unread:
    """A decoder whose fingerprint must not be asked for."""

    @property
    def fingerprint(self) -> str:
        raise AssertionError("reads all weights")


class Known:
    fingerprint = "f" * 64


UNREAD, KNOWN = (cls() for cls in (Unread, Known))  # type: Any


def test_a_saved_profile_is_loaded_as_it_was(cache: Path, tmp_path: Path) -> None:
    profile = profile_of("a" * 64)
    assert Profile.load("a" * 64) is None
    assert profile.save() == cache / "profiles" / f"{'a' * 64}.json"
    assert Profile.load("a" * 64) == profile
    assert Profile.load("b" * 64) is None
    changed = replace(profile, layers="0.5-1")
    changed.save()
    assert Profile.load("a" * 64) == changed
    assert profile.save(tmp_path / "here.json") == tmp_path / "here.json"
    assert json.loads((tmp_path / "here.json").read_text()) == profile.as_dict()
    assert [path.name for path in (cache / "profiles").iterdir()] == [f"{'a' * 64}.json"]


def test_a_write_that_fails_leaves_what_was_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_of("a" * 64)
    path = profile.save()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ProfileError, match=r"aaa\.json cannot be written: No space left on device"):
        replace(profile, layers="0.5-1").save()
    assert Profile.load("a" * 64) == profile
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_or_foreign_file_is_an_error_that_names_it() -> None:
    path = profile_of("a" * 64).save()
    good = json.loads(path.read_text())
    for content, message in {
        "{": "is damaged: it is not JSON",
        "\xff": "is damaged: it is not JSON",
        "[1]": "has the format None, not 'kvloom profile 1'",
        json.dumps(good | {"format": "kvloom profile 2"}): "has the format 'kvloom profile 2'",
        json.dumps({key: value for key, value in good.items() if key != "layers"}): "layers: Field required",
        json.dumps(good | {"per_layer": [{"layers": "0"}]}): "per_layer.0.needle_recall: Field required",
        json.dumps(good | {"layers": "0.9-0.1"}): "is damaged: infoflow: layers must be",
        json.dumps(good | {"fingerprint": "b" * 64}): "is of another model (tiny, bbbbbbbbbbbb)",
    }.items():
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ProfileError) as caught:
            Profile.load("a" * 64)
        assert str(caught.value).startswith(f"profile {path} ")
        assert message in str(caught.value)
        assert str(caught.value).endswith("delete it, or run kvloom calibrate again")


def test_infoflow_by_name_takes_the_layers_of_this_very_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvloom.profile")
    profile_of("e" * 64).save()
    assert as_selector_for(KNOWN, "infoflow") == InfoFlow(), "only another model has a profile"
    assert not caplog.records
    profile_of(KNOWN.fingerprint).save()
    assert as_selector_for(KNOWN, "infoflow") == InfoFlow(layers=BAND)
    assert caplog.messages == [f"layers {BAND} from the profile calibrated on 2026-12-01 (kvloom calibrate)"]
    assert as_selector_for(KNOWN, "infoflow", {"ratio": "0.3"}) == InfoFlow(ratio=0.3, layers=BAND)
    with pytest.raises(MethodError, match="no option 'ratoi'"):
        as_selector_for(KNOWN, "infoflow", {"ratoi": 1})


def test_what_is_explicit_and_other_methods_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_selector_for(UNREAD, "infoflow") == InfoFlow(), "there is no profile at all"
    profile_of(KNOWN.fingerprint).save()
    assert as_selector_for(UNREAD, "infoflow", {"layers": "0.25-1"}) == InfoFlow()
    assert as_selector_for(UNREAD, "infoflow", {"layers": "1,2"}) == InfoFlow(layers="1,2")
    assert as_selector_for(UNREAD, InfoFlow()) == InfoFlow()
    assert as_selector_for(UNREAD, "cacheblend") == CacheBlend()
    monkeypatch.setenv("KVLOOM_PROFILE", "off")
    assert as_selector_for(UNREAD, "infoflow") == InfoFlow()
    monkeypatch.setenv("KVLOOM_PROFILE", "")
    assert as_selector_for(KNOWN, "infoflow") == InfoFlow(layers=BAND)
    monkeypatch.setenv("KVLOOM_PROFILE", "no")
    with pytest.raises(MethodError, match="KVLOOM_PROFILE is off or not set, got 'no'"):
        with_profile("infoflow", {}, UNREAD)


def test_methods_of_an_evaluation_say_their_layers() -> None:
    assert explicit_method("infoflow", UNREAD) == "infoflow"
    profile_of(KNOWN.fingerprint).save()
    assert explicit_method("infoflow", KNOWN) == f"infoflow:layers={BAND}"
    assert explicit_method("infoflow:", KNOWN) == f"infoflow:layers={BAND}"
    assert explicit_method("infoflow:ratio=0.3", KNOWN) == f"infoflow:ratio=0.3,layers={BAND}"
    for text in ("infoflow:layers=17,18", "infoflow:ratio=0.3,layers=0.25-1", "full", "cacheblend:ratio=0.3"):
        assert explicit_method(text, UNREAD) == text


def test_a_loom_scores_the_layers_of_its_models_profile() -> None:
    loom, other = loom_of("llama"), loom_of("qwen2")
    default, band = (repr(InfoFlow(layers=layers)) for layers in ("0.25-1", BAND))
    assert default != band

    def methods(loom: Loom) -> set[str]:
        report = loom.verify([QUESTION], DOCUMENTS, selector="infoflow", ratios=[])
        return {loom.answer(QUESTION, DOCUMENTS, max_new_tokens=1).trace.method, report.judged}

    prompt = loom.prompt(QUESTION, DOCUMENTS)
    cache = loom.splice(prompt)
    by_default = loom.select(cache, prompt, "infoflow").tolist()
    by_band = loom.select(cache, prompt, InfoFlow(layers=BAND)).tolist()
    assert by_default != by_band
    assert methods(loom) == methods(other) == {default}

    profile_of(loom.decoder.fingerprint).save()
    assert methods(loom) == {band}
    assert methods(other) == {default}, "it has another fingerprint"
    assert loom.select(cache, prompt, "infoflow").tolist() == by_band
    assert loom.select(cache, prompt, InfoFlow()).tolist() == by_default
    explicit = loom.answer(QUESTION, DOCUMENTS, options={"layers": "0.25-1"}, max_new_tokens=1)
    assert explicit.trace.method == default
    # Contexts and orders by name, too.
    rows = loom.context(QUESTION, DOCUMENTS).keys(2)
    assert rows.equal(loom.context(QUESTION, DOCUMENTS, selector=InfoFlow(layers=BAND)).keys(2))
    assert not rows.equal(loom.context(QUESTION, DOCUMENTS, selector=InfoFlow()).keys(2))
