from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom.registry
from kvloom.errors import MethodError
from kvloom.registry import Registry, parse_options


@dataclass(frozen=True, kw_only=True)
class Flow:
    ratio: float = 0.15
    layers: int = 2
    band: tuple[int, ...] = ()
    geometry: Literal["global", "local"] = "global"
    is_exact: bool = False
    doubled: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be in 0..1, got {self.ratio}")


@dataclass(frozen=True, kw_only=True)
class Keep:
    keep: float


@pytest.fixture
def registry() -> Registry:
    registry = Registry("selector")
    registry.register("infoflow")(Flow)
    registry.register("keeper")(Keep)
    return registry


def test_is_a_mapping_from_names_to_classes(registry):
    assert registry["infoflow"] is Flow
    assert vars(Flow)["name"] == "infoflow"
    assert list(registry) == ["infoflow", "keeper"]
    assert len(registry) == 2
    assert "infoflow" in registry
    assert "nothing" not in registry
    assert registry.get("infoflow") is Flow
    assert registry.get("nothing") is None


def test_a_name_is_taken_once(registry):
    with pytest.raises(ValueError, match="selector 'infoflow' is already registered as Flow"):
        registry.register("infoflow")(Keep)
    assert registry["infoflow"] is Flow


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("infoflo", "unknown selector 'infoflo'; did you mean 'infoflow'?"),
        ("InfoFlow", "unknown selector 'InfoFlow'; did you mean 'infoflow'?"),
        ("KEEPER", "unknown selector 'KEEPER'; did you mean 'keeper'?"),
        ("zzz", "unknown selector 'zzz'; there are: infoflow, keeper"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(registry, name, message):
    with pytest.raises(MethodError) as caught:
        registry[name]
    assert str(caught.value) == message
    with pytest.raises(MethodError, match="unknown selector"):
        registry.build(name)


def test_an_empty_registry_suggests_nothing():
    with pytest.raises(MethodError) as caught:
        Registry("selector")["infoflow"]
    assert str(caught.value) == "unknown selector 'infoflow'"


def test_text_becomes_the_type_of_its_field(registry):
    options = {"ratio": "0.15", "layers": "4", "band": "[3, 5]", "geometry": "local", "is_exact": "true"}
    method = registry.build("infoflow", options)
    assert method == Flow(ratio=0.15, layers=4, band=(3, 5), geometry="local", is_exact=True)
    assert type(method.ratio) is float
    assert registry.build("infoflow") == Flow()
    assert registry.build("infoflow", {"ratio": 0.5}) == Flow(ratio=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "abc"}, 'infoflow: option ratio: "abc" will not do: input should be a valid number'),
        ({"layers": "1.5"}, 'infoflow: option layers: "1.5" will not do: input should be a valid integer'),
        ({"band": "[1, x]"}, r'infoflow: option band: "\[1, x\]" will not do: invalid JSON'),
        ({"band": "3"}, 'infoflow: option band: "3" will not do: input should be a valid tuple'),
        ({"geometry": "up"}, "will not do: input should be 'global' or 'local'"),
        ({"ratio": None}, "infoflow: option ratio: null will not do"),
        ({"ratio": "2"}, r"infoflow: ratio must be in 0\.\.1, got 2\.0"),
        ({"ratios": "0.1"}, r"selector 'infoflow' has no option 'ratios'; did you mean 'ratio'\?"),
        ({"zzz": "1"}, "has no option 'zzz'; there are: band, geometry, is_exact, layers, ratio"),
        ({"doubled": "1"}, "has no option 'doubled'"),
    ],
)
def test_a_wrong_option_is_a_method_error(registry, options, message):
    with pytest.raises(MethodError, match=message):
        registry.build("infoflow", options)


def test_a_missing_option_is_a_method_error(registry):
    with pytest.raises(MethodError, match="selector 'keeper' needs the option 'keep': keep=VALUE"):
        registry.build("keeper")
    assert registry.build("keeper", {"keep": "0.5"}) == Keep(keep=0.5)


def test_packages_outside_add_methods_through_entry_points(registry, monkeypatch):
    asked = []

    class EntryPoint:
        def load(self) -> None:
            registry.register("outside")(type("Outside", (), {}))

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint()]

    monkeypatch.setattr(kvloom.registry, "entry_points", entry_points)
    assert "outside" in registry
    assert list(registry) == ["infoflow", "keeper", "outside"]
    assert asked == ["kvloom.selectors"]


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1))
def test_every_float_survives_its_text(value):
    registry = Registry("selector")
    registry.register("keeper")(Keep)
    assert registry.build("keeper", {"keep": repr(value)}).keep == value


def test_parse_options():
    assert parse_options([]) == {}
    assert parse_options(["ratio=0.15", " band = [1, 2] ", "note=a=b", "empty="]) == {
        "ratio": "0.15",
        "band": "[1, 2]",
        "note": "a=b",
        "empty": "",
    }


@pytest.mark.parametrize("text", ["ratio", "", "=1", " =1"])
def test_parse_options_refuses_what_is_no_pair(text):
    with pytest.raises(MethodError, match="is not of the form NAME=VALUE"):
        parse_options([text])


def test_parse_options_refuses_a_name_given_twice():
    with pytest.raises(MethodError, match="option 'ratio' is given twice"):
        parse_options(["ratio=1", "ratio =2"])


NAMES = st.text(st.characters(exclude_characters="="), min_size=1).map(str.strip).filter(bool)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(NAMES, st.text().map(str.strip)))
def test_parse_options_reads_back_what_was_written(options):
    assert parse_options([f"{name}={value}" for name, value in options.items()]) == options
