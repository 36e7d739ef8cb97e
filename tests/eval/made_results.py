"""Run folders of results made up here, and how tests read the report made of them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvloom.eval.runner import Method, Recipe, Result

if TYPE_CHECKING:
    from pathlib import Path

Samples = dict[str, dict[str, Any]]
STAGES = ("load", "prefill", "splice", "score", "recompute", "first_token", "decode")
NONE = {"1": {"kl": 1.0, "first_kl": 2.0, "ttft": 0.1}, "2": {"kl": 3.0, "first_kl": 2.0, "ttft": 0.1}}
FULL = {
    "1": {"kl": 0.0, "first_kl": 0.0, "ttft": 1.0, "token_layers": 900, "recomputed_rows": 100},
    "2": {"kl": 0.0, "first_kl": 0.0, "ttft": 2.0, "token_layers": 1100, "recomputed_rows": 100},
}
FLOW = {
    "1": {"kl": 0.5, "first_kl": 1.0, "ttft": 0.1, "token_layers": 150, "recomputed_rows": 10},
    "2": {"kl": 0.5, "first_kl": 2.0, "ttft": 1.0, "token_layers": 250, "recomputed_rows": 20},
}


def line_of(method: str, benchmark: str, sample: str, given: dict[str, Any]) -> dict[str, Any]:
    seconds = dict.fromkeys(STAGES, 0.0) | given.get("seconds", {})
    trace = {
        "context_tokens": 100,
        "question_tokens": 5,
        "recomputed_rows": given.get("recomputed_rows", 0),
        "token_layers": given.get("token_layers", 50),
        "kv_bytes": given.get("kv_bytes", 2_500_000),
        "seconds": seconds | {"ttft": given.get("ttft", 0.1)},
    }
    trace |= {name: given[name] for name in ("context_tokens", "rows") if name in given}
    try:
        recipe = Method.parse(method).recipe
    except ValueError:
        recipe = method
    result = Result(
        benchmark=benchmark,
        sample=sample,
        kind=given.get("kind", ""),
        method=method,
        recipe=recipe,
        kl=given["kl"],
        first_kl=given.get("first_kl", given["kl"]),
        nll=given.get("nll", 1.0),
        agreement=given.get("agreement", 0.5),
        num_gold=3,
        trace=trace,
        f1=given.get("f1"),
        exact_match=given.get("exact_match"),
        contains=given.get("contains"),
        rope_similarity=given.get("rope_similarity"),
    )
    return asdict(result)


def write(folder: Path, sets: dict[str, dict[str, Samples]], **given: Any) -> Path:
    """A run folder of results by set, method and sample."""
    folder.mkdir(parents=True)
    methods = list(dict.fromkeys(method for by_method in sets.values() for method in by_method))
    recipe = {
        "model": "tiny",
        "methods": methods,
        "benchmarks": [f"{name}()" for name in sets],
        "limit": None,
        "chunks": "passages",
        "prompt_format": "PromptFormat()",
        "max_new_tokens": 0,
        "fingerprint": "f" * 64,
        "data": {name: f"digest of {name}" for name in sets},
    }
    (folder / "run.json").write_text(json.dumps(asdict(Recipe(**(recipe | given)))))
    lines = [
        json.dumps(line_of(method, name, sample, numbers))
        for name, by_method in sets.items()
        for method, samples in by_method.items()
        for sample, numbers in samples.items()
    ]
    (folder / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def grid(markdown: str, heading: str, number: int = 0) -> list[dict[str, str]]:
    """The table below a heading, as rows by column; of columns with the same name the first."""
    part = re.split(r"^#+ ", markdown.split(f" {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    table = re.findall(r"(?:^\|.*\n)+", part, flags=re.MULTILINE)[number].splitlines()
    header, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table)
    return [dict(zip(reversed(header), reversed(row), strict=True)) for row in body]


def by_method(rows: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {f"{row['method']} {row['options']}".strip(): row for row in rows}


def words(svg: str) -> list[str]:
    """The words of a plot, in the order of drawing."""
    return re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", svg)
