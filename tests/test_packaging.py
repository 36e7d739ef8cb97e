"""What is installed is what pyproject.toml, the Makefile and the other files say."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvloom
from kvloom.bundled import REQUIREMENT

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORT_NAMES = {
    "cogapp": "cogapp",
    "prometheus-client": "prometheus_client",
    "pytest-xdist": "xdist",
}


def read_lines(name: str) -> list[dict]:
    text = (files("kvloom") / "demo_corpus" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_installed_metadata_is_that_of_pyproject() -> None:
    installed = distribution("kvloom")
    assert installed.version == kvloom.__version__ == PROJECT["version"]
    (script,) = installed.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("kvloom", PROJECT["scripts"]["kvloom"])


def test_the_package_is_typed() -> None:
    assert (files("kvloom") / "py.typed").is_file()


def test_the_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[Unreleased\]$", changelog, re.MULTILINE)
    assert PROJECT["version"] in changelog


def test_the_license_is_apache_2() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_makefile_installs_the_model_that_the_code_expects() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^MODEL := (.*)$", makefile, re.MULTILINE)[1] == REQUIREMENT  # type: ignore[index]


# Not the hub's: it brings gigabytes that no test needs.
ALL_REQUIREMENTS = [
    Requirement(text)
    for extra, group in PROJECT["optional-dependencies"].items()
    for text in group
    if extra != "eval"
]
ALL_REQUIREMENTS += [Requirement(text) for text in PROJECT["dependencies"]]
OTHERS = sorted({r.name for r in ALL_REQUIREMENTS} - {"kvloom"})


@pytest.mark.parametrize("name", OTHERS)
def test_every_requirement_can_be_imported_and_is_pinned_inside_its_range(name: str) -> None:
    assert importlib.util.find_spec(IMPORT_NAMES.get(name, name)) is not None
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in constraints if line and not line.startswith("#")]
    (pin,) = [pin for pin in pins if canonicalize_name(pin.name) == canonicalize_name(name)]
    (exact,) = pin.specifier
    for requirement in ALL_REQUIREMENTS:
        if requirement.name == name:
            assert exact.version in requirement.specifier


def test_extras_refer_only_to_extras_that_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert {extra for r in ALL_REQUIREMENTS if r.name == "kvloom" for extra in r.extras} <= extras


def test_the_demo_corpus_is_complete_and_of_the_promised_sizes() -> None:
    passages = read_lines("passages.jsonl")
    assert 16 <= len(passages) <= 20
    assert all(passage.keys() == {"id", "title", "text"} for passage in passages)
    assert all(60 <= len(passage["text"].split()) <= 250 for passage in passages)
    for key in ("id", "title", "text"):
        assert len({passage[key] for passage in passages}) == len(passages)


def test_every_demo_answer_stands_in_its_passages() -> None:
    passages = {passage["id"]: passage for passage in read_lines("passages.jsonl")}
    questions = read_lines("questions.jsonl")
    assert sorted(question["hops"] for question in questions) == [1, 1, 1, 2, 2, 2]
    for question in questions:
        assert question.keys() == {"id", "question", "answers", "passages", "hops"}
        assert len(set(question["passages"])) == question["hops"]
        text = " ".join(passages[id]["title"] + " " + passages[id]["text"] for id in question["passages"])
        assert question["answers"]
        assert all(answer in text for answer in question["answers"])


def test_the_demo_corpus_names_its_source_and_licence() -> None:
    attribution = (files("kvloom") / "demo_corpus" / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "CC BY-SA 4.0" in attribution
    assert "HotpotQA" in attribution
    for passage in read_lines("passages.jsonl"):
        assert passage["title"] in attribution
