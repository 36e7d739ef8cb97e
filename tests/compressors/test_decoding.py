"""Answers that are compressed while they grow: schedule and kept sets, against each method's rule."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plain_forward import (
    REMOVED,
    Plain,
    best,
    drift_by_hand,
    entropy_by_hand,
    history,
    plain,
    pooled_by_hand,
    random_ids,
    rows_left,
    sets,
)
from tiny_models import FLOAT32, difference

from kvloom.compressors import Compressor, as_compressor, compressors
from kvloom.conversation import Conversation
from kvloom.errors import MethodError
from kvloom.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.loom import Loom

PROMPT, EVERY, RECENT = 16, 16, 4
SCHEDULE = {"every": EVERY, "recent": RECENT}
SECOND = EVERY // 2  # of two intervals, at keep 0.25
NAMES = sorted(name for name in compressors if "decode" in compressors[name].phases)


def grown(
    loom: Loom, ids: Tensor, method: Compressor | str, **options: Any
) -> tuple[Conversation, list[tuple[int, list[Tensor]]], list[Tensor]]:
    """The answer ids[PROMPT:] stepped through; for each compression the rows there were and those left; and
    the logits of every step.
    """
    if isinstance(method, str):
        options = SCHEDULE | options
    method = as_compressor(method, options or None, phase="decode")
    talk = Conversation(loom.decoder, decode_compressor=method)
    talk.prefill(ids[:PROMPT])
    drops, steps = [], []
    for token in ids[PROMPT:].tolist():
        before = 0 if talk._decoding is None else len(talk._decoding.done)
        steps.append(talk.step(token))
        assert talk._decoding is not None
        if len(talk._decoding.done) > before:
            drops.append((talk.cache.num_rows - 1, [rows[:, :-1] for rows in rows_left(talk.cache)]))
    return talk, drops, steps


def test_the_schedules_are_those_of_the_papers() -> None:
    built = {name: as_compressor(name, phase="decode") for name in NAMES}
    known = {name: (method.every, method.recent) for name, method in built.items()}
    assert known == dict.fromkeys(NAMES, (1024, 32)) | {"r-kv": (128, 8)}


def test_an_interval_belongs_to_answers_and_is_a_number_of_tokens() -> None:
    with pytest.raises(MethodError, match="infokv: every is for answers while they grow, not for prompts"):
        as_compressor("infokv", {"every": 64})
    with pytest.raises(MethodError, match="rpc: recent is a whole number of at least 1, got 0"):
        as_compressor("rpc", {"recent": 0}, phase="decode")
    with pytest.raises(MethodError, match="compressor 'knorm' has no option 'every'"):
        as_compressor("knorm", {"every": 64})


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_and_the_last_rows_stay_and_a_share_of_the_answer(name: str, llama_loom: Loom) -> None:
    ids = random_ids(PROMPT + 3 * EVERY + 1, seed=2)
    talk, drops, _ = grown(llama_loom, ids, name, keep=0.3)
    assert [num_rows for num_rows, _ in drops] == [PROMPT + EVERY * n for n in (1, 2, 3)]
    for n, (num_rows, left) in enumerate(drops, 1):
        for layer in left:
            assert layer.shape == (2, PROMPT + int(0.3 * n * EVERY) + RECENT)
            for head in layer.tolist():
                assert head[:PROMPT] == list(range(PROMPT)), "the prompt is never touched"
                assert head[-RECENT:] == list(range(num_rows - RECENT, num_rows))
                assert head == sorted(set(head))
    for (_, earlier), (num_rows, later) in pairwise(drops):
        for old, new in zip(sets(earlier), sets(later), strict=True):
            for before, after in zip(old, new, strict=True):
                assert {row for row in after if row < num_rows - EVERY} <= set(before), "what is gone is gone"
    trace = Trace()
    talk.end(ids[PROMPT:].tolist(), trace)
    kept = [PROMPT + int(0.3 * n * EVERY) + RECENT for n in (1, 2, 3)]
    assert [done["kept"] for done in trace.compressions] == [[number] * 3 for number in kept]


@pytest.mark.parametrize("name", NAMES)
def test_removal_while_decoding_equals_an_additive_mask(name: str, llama_loom: Loom) -> None:
    ids = random_ids(PROMPT + 2 * EVERY + 6, seed=2)
    _, drops, steps = grown(llama_loom, ids, name, keep=0.25)
    expected = plain(llama_loom, ids, history(llama_loom, len(ids), drops))
    for step, logits in enumerate(steps):
        assert difference(logits, expected.logits[PROMPT + step]) < 2 * REMOVED, f"token {step}"
    assert difference(steps[-1], plain(llama_loom, ids).logits[-1]) > 100 * REMOVED


@pytest.mark.parametrize("family", ["gpt-oss", "gemma2", "qwen3-moe", "phi"])
def test_removal_while_decoding_on_other_families(family: str) -> None:
    from tiny_models import loom_of

    loom, ids = loom_of(family), random_ids(PROMPT + EVERY + 5, seed=2)
    _, drops, steps = grown(loom, ids, "infokv", keep=0.25, k=20)
    expected = plain(loom, ids, history(loom, len(ids), drops))
    for step, logits in enumerate(steps):
        assert difference(logits, expected.logits[PROMPT + step]) < 2 * REMOVED, f"token {step}"


@pytest.mark.parametrize("length", [EVERY - 1, EVERY, EVERY + 1])
def test_an_answer_that_ends_at_the_interval_is_not_compressed(llama_loom: Loom, length: int) -> None:
    """The last token is never in the cache, so of EVERY + 1 tokens EVERY are, and no further one is asked
    for.
    """
    answer = llama_loom.generate(
        random_ids(PROMPT),
        decode_compressor="rpc",
        decode_options={"keep": 0.5, **SCHEDULE},
        max_new_tokens=length,
    )
    assert len(answer.token_ids) == length
    assert answer.trace.compressions == []
    assert answer.token_ids == llama_loom.generate(random_ids(PROMPT), max_new_tokens=length).token_ids
    longer = llama_loom.generate(
        random_ids(PROMPT),
        decode_compressor="rpc",
        decode_options={"keep": 0.5, **SCHEDULE},
        max_new_tokens=EVERY + 2,
    )
    assert [done["kept"] for done in longer.trace.compressions] == [[PROMPT + EVERY // 2 + RECENT] * 3]


@pytest.mark.parametrize("name", NAMES)
def test_keep_1_changes_no_token_of_an_answer(name: str, llama_loom: Loom) -> None:
    ids = random_ids(PROMPT)
    whole = llama_loom.generate(ids, max_new_tokens=2 * EVERY + 3)
    same = llama_loom.generate(
        ids, decode_compressor=name, decode_options={"keep": 1}, max_new_tokens=2 * EVERY + 3
    )
    assert same.token_ids == whole.token_ids
    assert same.trace.compressions == []
    for layer in range(3):
        assert torch.equal(same.continuation.cache.keys(layer), whole.continuation.cache.keys(layer))


# --- which rows


def second_compression(
    loom: Loom, name: str, **options: Any
) -> tuple[Plain, list[list[list[int]]], list[list[list[int]]]]:
    """The masked forward up to it, and by layer and head the candidates and the rows left of them."""
    ids = random_ids(PROMPT + 2 * EVERY + 1, seed=2)
    _, drops, _ = grown(loom, ids, name, **options)
    assert len(drops) == 2
    forward = plain(loom, ids[:-1], history(loom, len(ids) - 1, drops[:1]))
    earlier, last = sets(drops[0][1]), PROMPT + 2 * EVERY - RECENT
    between = list(range(PROMPT + EVERY, last))
    candidates = [[[row for row in head if row >= PROMPT] + between for head in layer] for layer in earlier]
    left = [[[row for row in head if PROMPT <= row < last] for head in layer] for layer in sets(drops[1][1])]
    return forward, candidates, left


def among(weights: Tensor, candidates: list[int]) -> Tensor:
    """Attention (..., T) whose softmax is over the candidates alone."""
    only = torch.zeros_like(weights)
    only[..., candidates] = weights[..., candidates]
    return only / only.sum(-1, keepdim=True)


def in_places(score: Tensor, candidates: list[int]) -> Tensor:
    """Pooled over 7 neighbours in the cache, where the candidates stand side by side."""
    pooled = torch.zeros_like(score)
    side_by_side = pooled_by_hand(score[candidates], 7, list(range(len(candidates))))
    pooled[candidates] = side_by_side
    return pooled


def test_rpc(llama_loom: Loom) -> None:
    """Mean over all heads and the last queries, softmax over the candidates; one set per layer."""
    forward, candidates, left = second_compression(llama_loom, "rpc", keep=0.25)
    for layer in range(3):
        own = candidates[layer][0]
        score = in_places(among(forward.weights[layer][:, :, -RECENT:], own).mean((0, 1, 2)), own)
        assert left[layer] == [best(score, SECOND, own)] * 2


def test_infokv_with_alpha_1_is_rpc(llama_loom: Loom) -> None:
    ids = random_ids(PROMPT + 3 * EVERY + 1, seed=2)
    _, rpc, _ = grown(llama_loom, ids, "rpc", keep=0.25)
    _, ours, _ = grown(llama_loom, ids, "infokv", keep=0.25, alpha=1.0)
    assert [sets(left) for _, left in ours] == [sets(left) for _, left in rpc]
    _, mixed, _ = grown(llama_loom, ids, "infokv", keep=0.25)
    assert [sets(left) for _, left in mixed] != [sets(left) for _, left in rpc]


@pytest.mark.parametrize("options", [{}, {"heads": "kv"}, {"support": "all"}, {"reduce": "sum"}], ids=str)
def test_infokv(llama_loom: Loom, options: dict[str, Any]) -> None:
    """The signals are those of the moment a row was made, under what was then in the cache; the softmax of E
    runs over every row that is held.
    """
    forward, candidates, left = second_compression(llama_loom, "infokv", keep=0.25, k=20, **options)
    entropy = entropy_by_hand(forward.logits, 20)
    entropy[0] = entropy[1:PROMPT].mean()  # the mean of the prompt
    information = (drift_by_hand(forward.states, forward.states[-1]) + 1) * entropy
    for layer in range(3):
        for head in range(2):
            own = candidates[layer][head]
            held = [*range(PROMPT), *own, *range(PROMPT + 2 * EVERY - RECENT, PROMPT + 2 * EVERY)]
            seen = forward.weights[layer][:, :, -RECENT:]
            if options.get("support") != "all":
                seen = among(seen, own)
            if options.get("heads") == "kv":
                seen = seen[head : head + 1]
            queries = seen.sum(2) if options.get("reduce") == "sum" else seen.mean(2)
            attention = in_places(queries.mean((0, 1)), own)
            score = torch.zeros_like(attention)
            score[held] = 0.9 * attention[held] + 0.1 * information[layer][held].softmax(0)
            assert left[layer][head] == best(score, SECOND, own)


def test_r_kv(llama_loom: Loom) -> None:
    """Largest of the group's heads, mean over queries; less the share of likeness to the other candidates."""
    forward, candidates, left = second_compression(llama_loom, "r-kv", keep=0.25, mix=0.3, threshold=0.2)
    for layer in range(3):
        for head in range(2):
            own = candidates[layer][head]
            importance = among(forward.weights[layer][head][:, -RECENT:], own).amax(0).mean(0)
            keys = forward.keys[layer][head][own].double()
            keys = keys / keys.norm(dim=1, keepdim=True)
            likeness = []
            for n, key in enumerate(keys):
                cosines = [float(key @ other) for m, other in enumerate(keys) if m != n]
                likeness.append(sum(cosine for cosine in cosines if cosine > 0.2) / len(keys))
            score = torch.zeros_like(importance)
            score[own] = 0.3 * importance[own] - 0.7 * torch.tensor(likeness).softmax(0).float()
            assert left[layer][head] == best(score, SECOND, own)


def test_streaming_keeps_the_latest_and_random_by_its_seed(llama_loom: Loom) -> None:
    _, candidates, left = second_compression(llama_loom, "streaming", keep=0.25)
    assert left == [[head[-SECOND:] for head in layer] for layer in candidates]
    seeds = [second_compression(llama_loom, "random", keep=0.25, seed=seed)[2] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert len({tuple(head) for layer in seeds[0] for head in layer}) == 6


# --- signals


def test_temperature_changes_neither_signals_nor_kept_rows(llama_loom: Loom) -> None:
    """Two answers of the same tokens, one greedy, one drawn at a temperature so low that it is greedy too."""
    method = as_compressor("infokv", {"keep": 0.25, **SCHEDULE}, phase="decode")
    talks = []
    for temperature in (0.0, 1e-4):
        answer = llama_loom.generate(
            random_ids(PROMPT),
            decode_compressor=method,
            max_new_tokens=2 * EVERY + 4,
            temperature=temperature,
            seed=1,
        )
        talks.append((answer.token_ids, answer.continuation.cache))
    assert talks[0][0] == talks[1][0]
    assert sets(rows_left(talks[0][1])) == sets(rows_left(talks[1][1]))
    for name in ("entropy", "drift"):
        assert torch.equal(talks[0][1].side[name], talks[1][1].side[name])


def test_prompt_and_answer_are_both_compressed(llama_loom: Loom) -> None:
    """The answer's rows beside a prompt of which every head holds its own part."""
    ids = random_ids(60, seed=4)
    answer = llama_loom.generate(
        ids,
        compressor="infokv",
        options={"keep": 0.4, "window": 8},
        decode_compressor="infokv",
        decode_options={"keep": 0.25, "heads": "kv", **SCHEDULE},
        max_new_tokens=EVERY + 6,
    )
    kept = [done["kept"] for done in answer.trace.compressions]
    assert kept == [[24] * 3, [24 + EVERY // 4 + RECENT] * 3]
    cache, tokens = answer.continuation.cache, torch.tensor(answer.token_ids)
    whole = torch.cat([ids, tokens[:-1]])
    left = rows_left(cache)
    prompt = [rows[:, :24] for rows in left]
    later = [rows[rows < 60 + EVERY].view(2, -1) for rows in left]
    expected = plain(llama_loom, whole, history(llama_loom, len(whole), [(60, prompt), (60 + EVERY, later)]))
    assert expected.logits[60:].argmax(-1).tolist() == tokens[1:].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_given_answer_at_once_is_one_step_for_each_token(llama_loom: Loom, name: str) -> None:
    """In two calls, the second of which begins between two compressions."""
    ids = random_ids(PROMPT + 2 * EVERY + 9, seed=3)
    stepped, drops, steps = grown(llama_loom, ids, name, keep=0.25)
    assert len(drops) == 2
    method = as_compressor(name, {"keep": 0.25, **SCHEDULE}, phase="decode")
    talk = Conversation(llama_loom.decoder, decode_compressor=method)
    talk.prefill(ids[:PROMPT])
    answer = ids[PROMPT:]
    logits = torch.cat([talk.follow(answer[:21]), talk.follow(answer[21:])])
    assert difference(logits, torch.stack(steps)) < FLOAT32
    assert sets(rows_left(talk.cache)) == sets(rows_left(stepped.cache))
    for signal, columns in talk.cache.side.items():
        assert difference(columns, stepped.cache.side[signal]) < FLOAT32
