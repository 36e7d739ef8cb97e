"""Texts, continuations over full and compressed caches, and the report of a fidelity run."""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import loom_of

from kvloom.compressors import compressors
from kvloom.conversation import Conversation
from kvloom.errors import EvalError, MethodError
from kvloom.eval import fidelity
from kvloom.eval.continuations import distances, far, follow, fork, kl_and_nll, near
from kvloom.eval.fidelity_report import report
from kvloom.eval.metrics import agreement, kl_per_token, nll_per_token
from kvloom.eval.texts import TextDocument, check_lengths, load_texts
from kvloom.observe import EntropyKind, Observer, Records

if TYPE_CHECKING:
    from pathlib import Path

    from kvloom.loom import Loom

PREFIX, CONTINUATION = 96, 256
LENGTH = PREFIX + CONTINUATION + 1


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two books and twenty problems."""
    (tmp_path / "haystack").mkdir()
    for name in ("ship", "weaver"):
        lines = [f"Day {n}: the {name} went on[{n}] and nothing was said of it." for n in range(80)]
        lines.insert(30, "[Footnote 3: This is no part of the text.]")
        (tmp_path / "haystack" / f"{name}.txt").write_text("\n\n".join(lines))
    (tmp_path / "gsm8k").mkdir()
    problems = [
        {"question": f"How much are {n} and 2?", "worked_answer": f"{n}+2=<<{n}+2={n + 2}>>{n + 2}"}
        | {"answers": [str(n + 2)]}
        for n in range(20)
    ]
    (tmp_path / "gsm8k" / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, problems)))
    return tmp_path


def text_of(loom: Loom, document: TextDocument) -> str:
    return loom.tokenizer.decode(document.ids[1:].tolist())


# --- texts


def test_prose_is_cut_into_pieces_that_begin_at_paragraphs_and_never_overlap(
    llama_loom: Loom, data: Path
) -> None:
    found = load_texts(llama_loom, ["prose"], data, documents=12, length=400)["prose"]
    assert {len(document.ids) for document in found} == {400}
    assert [document.id.partition(":")[0] for document in found[:4]] == ["ship", "weaver", "ship", "weaver"]
    days: dict[str, list[int]] = {"ship": [], "weaver": []}
    for document in found:
        assert document.ids[0] == llama_loom.tokenizer.bos_id
        text = text_of(llama_loom, document)
        assert text.startswith("Day ")
        assert "Footnote" not in text
        assert "[" not in text
        book = document.id.partition(":")[0]
        days[book] += [int(part.partition(":")[0]) for part in text.split("Day ")[1:-1]]
    for seen in days.values():
        assert len(set(seen)) == len(seen)
        assert min(seen) >= 7, "the first piece, with title and contents, is left out"
    assert days["ship"][:3] != days["weaver"][:3], "each book in an order of its own"
    again = load_texts(llama_loom, ["prose"], data, documents=2, length=400)["prose"]
    assert [document.id for document in again] == [document.id for document in found[:2]]


def test_worked_problems_follow_each_other_without_the_calculators_marks(
    llama_loom: Loom, data: Path
) -> None:
    (first, second) = load_texts(llama_loom, ["gsm8k"], data, documents=2, length=300)["gsm8k"]
    text = text_of(llama_loom, first)
    assert text.startswith(
        "Question: How much are 0 and 2?\nAnswer: 0+2=2\nThe answer is 2.\n\nQuestion: How much are 1"
    )
    assert "<<" not in text
    started = {part[:14] for part in text.split("How much are ")[1:]}
    assert started.isdisjoint(part[:14] for part in text_of(llama_loom, second).split("How much are ")[1:])


def test_texts_that_are_not_there_or_too_few(llama_loom: Loom, data: Path) -> None:
    def load(name: str, folder: Path | None = data, **options: int) -> Any:
        return load_texts(llama_loom, [name], folder, **{"documents": 1, "length": 400} | options)

    with pytest.raises(MethodError, match="unknown text set 'pros'; did you mean 'prose'"):
        load("pros")
    with pytest.raises(EvalError, match="prose has 18 documents of 400 tokens, 99 are asked for"):
        load("prose", documents=99)
    with pytest.raises(EvalError, match=r"documents of 3,000 tokens do not fit the model, which takes 2,048"):
        load("prose", length=3000)
    with pytest.raises(EvalError, match="name one with --data"):
        load("prose", None)
    with pytest.raises(EvalError, match=r"holds no \.txt file"):
        load("prose", data / "gsm8k")
    (data / "gsm8k" / "gsm8k.jsonl").write_text('{"question": "How?"}')
    with pytest.raises(EvalError, match="a line without question, worked_answer"):
        load("gsm8k")
    for prefix, continuation, message in ((0, 256, "got 0"), (5, 128, "got 128"), (5, 300, "got 300")):
        with pytest.raises(MethodError, match=message):
            check_lengths(prefix, continuation)


# --- continuations


def random_ids(number: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 256, (number,), generator=torch.Generator().manual_seed(5))


def test_the_reference_is_a_full_forward_and_chunks_are_means_of_tokens(llama_loom: Loom) -> None:
    decoder, ids = llama_loom.decoder, random_ids()
    cache = decoder.new_cache(PREFIX)
    Observer(decoder, cache, Records()).run(ids[:PREFIX])
    reference = follow(decoder, fork(decoder, cache), ids[PREFIX:])
    assert cache.num_rows == PREFIX, "what is run over a fork does not change the cache"
    with torch.no_grad():
        whole = llama_loom.model(input_ids=ids[None]).logits[0, PREFIX:-1]
    assert (reference.logits - whole).abs().max() < 1e-3
    nll = nll_per_token(whole, ids[PREFIX + 1 :]).view(2, 128).mean(1)
    assert reference.nll == pytest.approx(nll.tolist(), rel=1e-5)
    same = distances(decoder, fork(decoder, cache), reference)
    assert max(same.kl) < 1e-12
    assert (same.dnll, same.agreement) == ([pytest.approx(0, abs=1e-9)] * 2, [1, 1])


def test_the_quick_kl_is_that_of_the_metrics() -> None:
    generator = torch.Generator().manual_seed(1)
    full, other = (4 * torch.randn((7, 50), generator=generator) for _ in range(2))
    targets = torch.arange(7)
    kl, nll = kl_and_nll(full, full.double().logsumexp(-1), other, targets)
    torch.testing.assert_close(kl, kl_per_token(full, other), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(nll, nll_per_token(other, targets), rtol=1e-12, atol=1e-13)
    for logits in (full, other):
        logits[:, 40] = -torch.inf
    kl, _ = kl_and_nll(full, full.double().logsumexp(-1), other, targets)
    torch.testing.assert_close(kl, kl_per_token(full, other), rtol=1e-12, atol=1e-13)


def test_near_is_the_first_256_tokens_and_far_the_second_half() -> None:
    by_chunk = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    assert (near(by_chunk), far(by_chunk)) == (1.5, 60.0)


# --- the run


def measured(loom: Loom, folder: Path, methods: list[str], keeps: list[float]) -> list[dict[str, Any]]:
    texts = {"prose": [TextDocument("prose", f"d{n}", random_ids() + n) for n in range(2)]}
    recipe = fidelity.make_recipe(
        loom, "tiny", texts, methods, keeps, prefix=PREFIX, continuation=CONTINUATION
    )
    fidelity.run(loom, texts, recipe, folder)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


METHODS = ["infokv:window=8", "infokv:window=8,k=16", "snapkv:window=8,kernel=9", "h2o", "random:last=8"]


def test_every_line_is_what_a_conversation_and_one_long_forward_give(tmp_path: Path) -> None:
    loom = loom_of("llama")
    lines = measured(loom, tmp_path, METHODS, [0.2, 0.5])
    assert [(line["document"], line["method"], line["keep"]) for line in lines[:10]] == [
        ("d0", method, keep)
        for group in ((METHODS[0], *METHODS[2:]), METHODS[1:2])  # another k is another prefill
        for method in group
        for keep in (0.2, 0.5)
    ]
    ids = random_ids()
    with torch.no_grad():
        whole = loom.model(input_ids=ids[None]).logits[0, PREFIX:-1]
    for line in lines[:10]:
        compressor = compressors.build(line["name"], line["options"])
        talk = Conversation(loom.decoder, compressor=compressor)
        talk.prefill(ids[:PREFIX])
        done = talk.compress()
        assert done is not None
        logits = loom.decoder.follow(ids[PREFIX:-1], talk.cache)
        kl = kl_per_token(whole, logits).view(2, 128).mean(1)
        assert line["kl"] == pytest.approx(kl.tolist(), rel=1e-3)
        assert line["kl"][0] > 1e-3
        assert fmean(line["agreement"]) == pytest.approx(agreement(whole, logits))
        dnll = nll_per_token(logits, ids[PREFIX + 1 :]) - nll_per_token(whole, ids[PREFIX + 1 :])
        assert line["dnll"] == pytest.approx(dnll.view(2, 128).mean(1).tolist(), rel=1e-3, abs=1e-5)
        assert (line["bytes"], line["kept"]) == (done.bytes_after, [int(line["keep"] * PREFIX)] * 3)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loom = loom_of("llama")
    whole = measured(loom, tmp_path / "whole", METHODS[2:], [0.5])
    part = tmp_path / "part"
    part.mkdir()
    (part / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    text = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    (part / "results.jsonl").write_text("\n".join(text[:4]) + "\n")
    seen: list[list[str]] = []
    measure = fidelity.measure

    def counting(loom: Loom, document: TextDocument, missing: list[Any], prefix: int) -> Any:
        seen.append([document.id, *(contender.label for contender in missing)])
        return measure(loom, document, missing, prefix)

    monkeypatch.setattr(fidelity, "measure", counting)
    resumed = measured(loom, part, METHODS[2:], [0.5])
    assert seen == [["d1", "h2o", "random:last=8"]]
    assert [line["kl"] for line in resumed] == [line["kl"] for line in whole]
    with pytest.raises(EvalError, match="another recipe"):
        measured(loom, part, METHODS[2:], [0.4])


def test_one_prefill_serves_all_whose_records_agree() -> None:
    groups = fidelity.together(fidelity.contenders(METHODS, [0.5]))
    assert [[member.label for member in members] for _, members in groups] == [
        [METHODS[0], *METHODS[2:]],
        [METHODS[1]],
    ]
    assert groups[0][0] == Records(entropy=EntropyKind(k=256), drift="residual", window=32, received=True), (
        "the window also serves answers, whose last 32 queries score"
    )
    with pytest.raises(MethodError, match="keep is given with the method"):
        fidelity.contenders(["knorm:keep=0.2"], [0.5])
    with pytest.raises(MethodError, match="a method is given twice"):
        fidelity.contenders(["knorm", "knorm"], [0.5])
    with pytest.raises(MethodError, match="a share is given twice"):
        fidelity.contenders(["knorm"], [0.5, 0.5])
    with pytest.raises(MethodError, match="keep is the share"):
        fidelity.contenders(["knorm"], [1.5])


# --- the report


def write_run(folder: Path, kl: dict[str, list[float]], num_bytes: dict[str, int] | None = None) -> None:
    """A run of one share, with the same KL in both halves of every document."""
    documents = range(len(next(iter(kl.values()))))
    recipe = {
        "model": "tiny",
        "sets": ["prose"],
        "documents": len(documents),
        "prefix": 96,
        "continuation": 256,
        "fingerprint": "f" * 64,
        "data": {},
        "kvloom_version": "1",
        "versions": {"torch": "2"},
        "methods": list(kl),
        "keeps": [0.5],
    }
    (folder / "run.json").write_text(json.dumps(recipe))
    lines = []
    for method, values in kl.items():
        contender = fidelity.contenders([method], [0.5])[0].compressor
        lines += [
            {
                "set": "prose",
                "document": f"d{n}",
                "method": method,
                "keep": 0.5,
                "name": contender.name,
                "recipe": repr(contender),
                "options": asdict(contender),
                "kept": [48] * 3,
                "bytes": (num_bytes or {}).get(method, 5_000_000),
                "full_bytes": 10_000_000,
                "compress_s": 0.1,
                "note": "",
                "full_nll": [1.0, 1.0],
                "kl": [values[n]] * 2,
                "dnll": [2 * values[n]] * 2,
                "agreement": [0.75] * 2,
            }
            for n in documents
        ]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def table_row(markdown: str, *cells: str) -> list[str]:
    """The cells of the one row that begins with these."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    (found,) = [row for row in rows if row[: len(cells)] == list(cells)]
    return found


def test_the_report_pairs_infokv_with_its_parent_and_everything_with_chance(tmp_path: Path) -> None:
    base = [0.010, 0.020, 0.030, 0.040, 0.900, 0.200]
    write_run(
        tmp_path,
        {
            "infokv": [value - 0.001 for value in base],
            "infokv:window=32": base,
            "snapkv:kernel=9": base,
            "snapkv:kernel=5": base,
            "random": [2 * value for value in base],
            "pyramidkv": base,
        },
        {"pyramidkv": 4_000_000},
    )
    page = report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    row = table_row(text, "infokv", "0.5")
    assert row[2:5] == ["48", "5.0", "50.0%"]
    assert row[5].startswith("199 [")
    assert (row[6], row[7], row[8], row[10]) == ("34", "199", "199", "75.0%")
    assert row[9].startswith("398 [")
    parent = table_row(text, "infokv", "snapkv:kernel=9")
    assert parent[2:] == [
        *("its attention-only parent", "0.5", "equal"),
        "\N{MINUS SIGN}1 [\N{MINUS SIGN}1, \N{MINUS SIGN}1]",
        *("0.031", "\N{MINUS SIGN}1", "6 of 6", "0.99"),  # p: 2 of 64 sign patterns
    ]
    assert "snapkv:kernel=5 | its attention" not in text
    assert "infokv:window=32 | snapkv" not in text, "its parent has a window of 32 too, and is not here"
    chance = table_row(text, "pyramidkv", "random")
    assert chance[4] == "80.0%"
    assert (
        "infokv at keep 0.5 against snapkv:kernel=9 (its attention-only parent), equal bytes: "
        "closer to the full cache (mean difference" in text
    )
    assert "against random (chance), 80.0% of its bytes" in text
    assert page.read_text().count("<svg") == 1


def test_the_report_does_not_claim_what_the_documents_cannot_show(tmp_path: Path) -> None:
    write_run(tmp_path, {"infokv": [0.1, 0.2, 0.3], "snapkv:kernel=9": [0.3, 0.2, 0.1]})
    report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "equal bytes: no difference that 3 documents can show" in text
    four = [0.01, 0.02, 0.03, 0.9]
    write_run(tmp_path, {"infokv": [0.0] * 4, "snapkv:kernel=9": four})
    report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "no difference that 4 documents can show" in text, "all are lower, as by chance in 1 of 8"
    write_run(tmp_path, {"infokv": [0.1], "snapkv:kernel=9": [0.3]})
    report(tmp_path)
    assert "one document cannot tell" in (tmp_path / "report.md").read_text()


def test_documents_that_a_method_lacks_are_left_out_and_counted(tmp_path: Path) -> None:
    write_run(tmp_path, {"knorm": [0.1, 0.2, 0.3], "random": [0.1, 0.2, 0.3]})
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "prose, 2 documents" in text
    assert "1 more have not been measured with every method and are left out." in text
    with pytest.raises(EvalError, match=r"has no run\.json"):
        report(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text('{"model": "m"}')
    with pytest.raises(EvalError, match="not the recipe of a run of `kvloom fidelity`"):
        report(tmp_path)
