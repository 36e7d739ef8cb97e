"""Compression once on the bundled model: signals as they are in trained models, and text that makes sense."""

from __future__ import annotations

import pytest
import torch
from plain_forward import REMOVED, history, plain, rows_left
from tiny_models import difference

from kvloom.compressors.infokv import InfoKV
from kvloom.loom import Loom

pytestmark = pytest.mark.real_model

TEXT = (
    "The Jacquard machine was shown in Lyon in 1804. A chain of punched cards controls it, one card for each "
    "row of the cloth. Ada Lovelace wrote in 1843 that the Analytical Engine weaves algebraical patterns as "
    "the loom weaves flowers and leaves. Charles Babbage owned a portrait of Jacquard that was woven in silk "
    "with 24,000 cards. Herman Hollerith later used cards to count the people of the United States. "
)
PROMPT = TEXT + "Read this again. " + TEXT + "What controls the Jacquard machine?"


@pytest.fixture(scope="module")
def loom() -> Loom:
    return Loom.from_pretrained("bundled:smollm2")


def test_infokv_on_a_trained_model(loom: Loom) -> None:
    answer = loom.generate(PROMPT, compressor=InfoKV(keep=0.4), max_new_tokens=24)
    done, cache = answer.trace.compressions[0], answer.continuation.cache
    num_prompt = done["num_rows"]
    assert 220 < num_prompt < 400
    assert done["kept"] == [int(0.4 * num_prompt)] * 30
    assert done["bytes_after"] == sum(done["kept"]) * 3 * 2 * 64 * 4
    entropy, drift = cache.side["entropy"], cache.side["drift"]
    assert entropy.isfinite().all()
    assert drift.isfinite().all()
    assert 0 <= float(entropy.min()) < 0.2
    assert float(entropy.max()) <= torch.tensor(256.0).log()
    assert drift[-1].abs().max() < 1e-6
    by_layer = drift.mean(1)
    assert by_layer[:15].min() > 0.8, "far from the end in the first half, as the paper's figure has it"
    assert by_layer[15] > by_layer[25] > by_layer[28] > by_layer[29]
    assert "Jacquard machine is controlled by" in answer.text


def test_the_second_reading_of_a_text_surprises_less(loom: Loom) -> None:
    """Entropies stand with the tokens that they are of: those of a repeated text fall."""
    ids = torch.tensor(loom.tokenizer.encode(TEXT))
    answer = loom.generate(torch.cat([ids, ids]), compressor=InfoKV(keep=0.4), max_new_tokens=1)
    entropy = answer.continuation.cache.side["entropy"]
    assert entropy[len(ids) + 5 :].mean() < 0.4 * entropy[: len(ids)].mean()


def test_removal_equals_a_mask_on_a_trained_model(loom: Loom) -> None:
    from kvloom.conversation import Conversation

    ids = torch.tensor(loom.tokenizer.encode(TEXT))
    talk = Conversation(loom.decoder, compressor=InfoKV(keep=0.4, window=16))
    talk.prefill(ids[:80])
    talk.compress()
    left = rows_left(talk.cache)
    logits = loom.decoder.follow(ids[80:90], talk.cache)
    expected = plain(loom, ids[:90], history(loom, 90, [(80, left)]))
    assert difference(logits, expected.logits[80:]) < 10 * REMOVED
