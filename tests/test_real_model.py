"""The exactness oracles once on the bundled model, with its real tokenizer and chat template."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FLOAT32, difference

from kvloom.loom import Loom
from kvloom.prompt import Document, Prompt
from kvloom.selectors import InfoFlow
from kvloom.verify import kl_divergence

pytestmark = pytest.mark.real_model

DOCUMENTS = [
    Document(
        "The Jacquard machine was shown in Lyon in 1804. A chain of punched cards controls it.",
        title="Jacquard",
    ),
    Document(
        "Ada Lovelace wrote in 1843 that the Analytical Engine weaves algebraical patterns.", title="Lovelace"
    ),
    Document(
        "Charles Babbage owned a portrait of Jacquard, woven in silk with 24,000 cards.", title="Babbage"
    ),
]
QUESTION = "What controls the Jacquard machine?"


@pytest.fixture(scope="module")
def loom() -> Loom:
    return Loom.from_pretrained("bundled:smollm2")


@pytest.fixture(scope="module")
def prompt(loom: Loom) -> Prompt:
    return loom.prompt(QUESTION, DOCUMENTS)


def test_it_is_the_model_it_should_be(loom: Loom) -> None:
    shapes = {tuple(shape) for shape in loom.decoder.kv_shapes}
    assert (loom.decoder.num_layers, shapes, loom.decoder.max_length) == (30, {(3, 64, 64)}, 8192)
    assert max(loom.rotation_errors) < 1e-4


def test_the_prompt_is_that_of_the_models_own_template(loom: Loom, prompt: Prompt) -> None:
    text = loom.tokenizer.decode(prompt.token_ids.tolist(), skip_special=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [text.count(document.text) for document in DOCUMENTS] == [1, 1, 1]


def test_oracles(loom: Loom, prompt: Prompt) -> None:
    full, expected = loom.full_prefill(prompt)
    cache = loom.splice(prompt)
    context = slice(0, cache.num_rows)
    assert difference(cache.keys(0), full.keys(0)[:, context]) < FLOAT32
    assert difference(cache.values(29), full.values(29)[:, context]) > 0.01
    rows = (~cache.exact).nonzero().flatten()
    assert difference(loom.recompute(cache, rows, prompt), expected) < FLOAT32
    for layer in range(30):
        assert difference(cache.keys(layer), full.keys(layer)) < FLOAT32
        assert difference(cache.values(layer), full.values(layer)) < FLOAT32
    with torch.no_grad():
        own = loom.model(input_ids=prompt.token_ids[None]).logits[0, -1]
    assert difference(expected, own) < FLOAT32


def test_one_document_needs_no_repair(loom: Loom) -> None:
    prompt = loom.prompt(QUESTION, DOCUMENTS[:1])
    _, expected = loom.full_prefill(prompt)
    assert difference(loom.recompute(loom.splice(prompt), torch.arange(0), prompt), expected) < FLOAT32


def test_repair_brings_the_answer_nearer_to_full_prefill(loom: Loom, prompt: Prompt) -> None:
    _, expected = loom.full_prefill(prompt)
    divergence = {}
    for ratio in (0.0, 0.15, 0.5):
        cache = loom.splice(prompt)
        rows = loom.select(cache, prompt, InfoFlow(ratio=ratio))
        divergence[ratio] = kl_divergence(expected, loom.recompute(cache, rows, prompt))
    assert divergence[0.5] < divergence[0.15] < divergence[0.0]


def test_the_answer_is_sensible(loom: Loom) -> None:
    answer = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=32)
    assert "card" in answer.text.lower()
    assert answer.trace.finish_reason in ("eos", "length")
