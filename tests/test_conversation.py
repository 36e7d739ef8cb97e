"""Turns over one cache: true positions, compressed again, failed, shared, saved and taken up again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from byte_tokenizer import ByteTokenizer
from plain_forward import history, plain, random_ids, rows_left, sets
from tiny_models import FAMILIES, build, difference, loom_of

from kvloom.compressors import Compressor, as_compressor, compressors
from kvloom.conversation import Conversation
from kvloom.errors import ContextTooLong, MethodError, PromptError, StoreError
from kvloom.generate import Sampling
from kvloom.loom import Loom

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvloom.trace import Answer

FIRST, SECOND = random_ids(50, seed=1), random_ids(20, seed=2)
SMALL: dict[str, Any] = {"keep": 0.4, "window": 8, "k": 20}


SCHEDULE = {"every": 16, "recent": 4}


def infokv(**options: Any) -> Compressor:
    return as_compressor("infokv", SMALL | options)


def talk_of(answer: Answer) -> Conversation:
    return answer.continuation


# --- turns


def test_a_second_turn_without_compression_is_one_prompt(llama_loom: Loom) -> None:
    """Prompt, answer and second prompt at once, with the answer's last token that was not in the cache
    yet.
    """
    first = llama_loom.generate(FIRST, max_new_tokens=7)
    assert talk_of(first).pending == first.token_ids[-1:]
    second = llama_loom.generate(SECOND, after=first, max_new_tokens=5)
    whole = torch.cat([FIRST, torch.tensor(first.token_ids), SECOND])
    cache, logits = talk_of(second).cache, []
    assert cache.positions.tolist() == list(range(len(whole) + 4))
    expected = plain(llama_loom, torch.cat([whole, torch.tensor(second.token_ids)]))
    logits = expected.logits[len(whole) - 1 : -1]
    assert logits.argmax(-1).tolist() == second.token_ids
    for layer in range(3):
        assert difference(cache.keys(layer), expected.keys[layer][:, :-1]) < 1e-4
    assert second.token_ids == llama_loom.generate(whole, max_new_tokens=5).token_ids
    assert second.trace.token_layers == (1 + len(SECOND)) * 3


@pytest.mark.parametrize("end", ["limit", "eos", "stop"])
def test_nothing_of_an_answer_is_lost_however_it_ended(llama_loom: Loom, end: str) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 4}
    tokens = llama_loom.generate(FIRST, max_new_tokens=6, **drawn).token_ids
    loom, options = llama_loom, {}
    if end == "eos":
        new = [token for place, token in enumerate(tokens) if token not in tokens[:place]]
        model = build(FAMILIES["llama"] | {"eos_token_id": new[-1]})
        loom = Loom(model, ByteTokenizer(eos_token=None))
    elif end == "stop":
        options["stop"] = llama_loom.tokenizer.decode(tokens[3:5])
    first = loom.generate(FIRST, max_new_tokens=6, **drawn, **options)
    assert first.trace.finish_reason == ("length" if end == "limit" else end)
    assert first.token_ids == tokens[: len(first.token_ids)] != []
    held = talk_of(first).cache.token_ids.tolist() + talk_of(first).pending
    assert held == FIRST.tolist() + first.token_ids
    assert len(talk_of(first).pending) == (0 if end == "eos" else 1)
    second = loom.generate(SECOND, after=first, max_new_tokens=3, **drawn)
    whole = torch.cat([FIRST, torch.tensor(first.token_ids), SECOND])
    assert second.token_ids == loom.generate(whole, max_new_tokens=3, **drawn).token_ids


def test_a_second_turn_after_compression_sees_what_is_left_at_true_positions(llama_loom: Loom) -> None:
    first = llama_loom.generate(FIRST, compressor=infokv(), max_new_tokens=4)
    left = [rows[:, :20] for rows in rows_left(talk_of(first).cache)]
    second = llama_loom.generate(SECOND, after=first, compressor=infokv(keep=1), max_new_tokens=4)
    whole = torch.cat([FIRST, torch.tensor(first.token_ids), SECOND, torch.tensor(second.token_ids)])
    expected = plain(llama_loom, whole, history(llama_loom, len(whole), [(50, left)]))
    assert expected.logits[len(whole) - 5 : -1].argmax(-1).tolist() == second.token_ids
    assert expected.logits[49 : 49 + 4].argmax(-1).tolist()[1:] == first.token_ids[1:]


def test_compressing_again_keeps_the_share_of_the_whole(llama_loom: Loom) -> None:
    """Of 50 + 4 + 20 tokens 0.4, from what was left of the first and all of the rest; signals survive."""
    first = llama_loom.generate(FIRST, compressor=infokv(), max_new_tokens=4)
    before = [set(head) for layer in sets(rows_left(talk_of(first).cache)) for head in layer]
    second = llama_loom.generate(SECOND, after=first, max_new_tokens=1)
    assert second.trace.compressions[0]["kept"] == [29] * 3
    assert second.trace.compressions[0]["held"] == [20 + 4 + 20] * 3
    after = [set(head) for layer in sets(rows_left(talk_of(second).cache)) for head in layer]
    for old, new in zip(before, after, strict=True):
        assert {row for row in new if row < 50} <= old
        assert set(range(66, 74)) <= new, "the window of the second prompt"
        assert {row for row in new if row < 50}, "and something of the first"


def test_infokv_scores_survivors_by_the_signals_they_had(llama_loom: Loom) -> None:
    """alpha 0: the second compression is decided by E alone, of rows made before and after the first."""
    method = infokv(alpha=0.0, tau=1.0, window=4)
    first = llama_loom.generate(FIRST, compressor=method, max_new_tokens=1)
    cache = talk_of(first).cache
    first_set = sets(rows_left(cache))
    second = llama_loom.generate(SECOND, after=first, max_new_tokens=1)
    cache = talk_of(second).cache
    information = (cache.side["drift"] + 1) * cache.side["entropy"]
    for layer, rows in enumerate(sets(rows_left(cache))):
        for head in range(2):
            held = [*first_set[layer][head], *range(50, 71)]
            free = [row for row in held if row < 67]
            ranked = sorted(free, key=lambda row: -float(information[layer][row]))
            assert rows[head] == sorted([*ranked[:24], 67, 68, 69, 70])


def test_protected_rows_stay_through_all_turns(llama_loom: Loom) -> None:
    first = llama_loom.generate(FIRST, compressor=infokv(keep=0.2), protect=[range(3, 7)], max_new_tokens=2)
    second = llama_loom.generate(SECOND, after=first, protect=[range(52, 54)], max_new_tokens=2)
    for layer in sets(rows_left(talk_of(second).cache)):
        for head in layer:
            assert {3, 4, 5, 6, 52, 53} <= set(head)


def test_the_window_of_a_short_second_turn_reaches_over_dropped_rows(llama_loom: Loom) -> None:
    """The last 8 rows may have been dropped in part while decoding: their queries still count, and no place
    before them is taken for one of theirs.
    """
    growing = as_compressor("infokv", SMALL | {"keep": 0.05, **SCHEDULE}, phase="decode")
    first = llama_loom.generate(
        FIRST, compressor=infokv(keep=0.9), decode_compressor=growing, max_new_tokens=18
    )
    dropped = set(range(67)) - set(sets(rows_left(talk_of(first).cache))[0][0])
    assert dropped & set(range(61, 67)), "of the last 8 with what follows, some are gone"
    method = as_compressor("infokv", SMALL | {"keep": 0.5, "alpha": 1.0})
    second = Conversation(llama_loom.decoder, compressor=method, after=talk_of(first))
    second.prefill(SECOND[:1])
    from kvloom.cache_probe import CacheProbe

    score = method.score(CacheProbe(second.cache, second.observer), 1)
    rows = rows_left(second.cache)[1]
    window = rows >= second.cache.num_rows - 8
    assert (score[window] == 0).all()
    assert (score[~window] > 0).all()
    asked = second.cache.positions[-8:].tolist()
    assert asked == list(range(61, 69))


def test_limits_and_misuse(llama_loom: Loom) -> None:
    with pytest.raises(ContextTooLong, match="2,060 tokens, the model takes 2,048"):
        llama_loom.generate(FIRST, max_new_tokens=2010)
    first = llama_loom.generate(FIRST, max_new_tokens=3)
    with pytest.raises(ContextTooLong, match="2,049 tokens, the model takes 2,048"):
        llama_loom.generate(SECOND, after=first, max_new_tokens=1976)
    with pytest.raises(ContextTooLong, match="2,053 tokens, model takes 2,048"):
        Conversation(llama_loom.decoder, after=talk_of(first)).prefill(torch.zeros(2000, dtype=torch.int64))
    for prompt in (
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(3),
        torch.zeros(1, 3, dtype=torch.int64),
        7,
    ):
        with pytest.raises(PromptError, match="a prompt is a string or token ids"):
            llama_loom.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="did you mean 'max_new_tokens'"):
        llama_loom.generate(FIRST, max_new_token=3)
    with pytest.raises(TypeError, match=r"options .* go with the name of a compressor"):
        llama_loom.generate(FIRST, options={"keep": 0.2})
    with pytest.raises(MethodError, match="rpc compresses answers while they grow"):
        llama_loom.generate(FIRST, compressor="rpc")
    with pytest.raises(MethodError, match="snapkv compresses prompts only"):
        llama_loom.generate(FIRST, decode_compressor="snapkv")
    with pytest.raises(MethodError, match="different entropy"):
        llama_loom.generate(FIRST, compressor=infokv(k=7), decode_compressor=infokv())
    documents = llama_loom.answer("Who?", ["A weaver."], max_new_tokens=2)
    with pytest.raises(PromptError, match=r"was not made by Loom\.generate"):
        llama_loom.generate(SECOND, after=documents)


def test_an_answer_is_gone_on_after_once_and_by_its_own_model(llama_loom: Loom) -> None:
    first = llama_loom.generate(FIRST, max_new_tokens=3)
    with pytest.raises(PromptError, match="that of another model"):
        loom_of("llama").generate(SECOND, after=first)
    llama_loom.generate(SECOND, after=first, max_new_tokens=2)
    with pytest.raises(PromptError, match="gone on with already"):
        llama_loom.generate(SECOND, after=first)


def test_a_compressor_that_needs_what_was_not_recorded_is_refused(llama_loom: Loom) -> None:
    first = llama_loom.generate(FIRST, compressor="knorm", max_new_tokens=3)
    with pytest.raises(MethodError, match="snapkv needs what was not recorded when this conversation began"):
        llama_loom.generate(SECOND, after=first, compressor="snapkv")
    second = llama_loom.generate(SECOND, after=first, compressor="keydiff", max_new_tokens=3)
    assert second.trace.compressions[0]["kept"] == [29] * 3


def test_an_answer_that_is_not_complete_cannot_be_gone_on_after(llama_loom: Loom, tmp_path: Path) -> None:
    from kvloom.long_answer import generate

    stream = generate(llama_loom, FIRST, max_new_tokens=9)
    talk = stream.continuation
    assert isinstance(talk, Conversation)
    for _ in range(3):
        next(stream._pieces)
    for misuse in (
        lambda: llama_loom.generate(SECOND, after=talk),
        lambda: talk.prefill(SECOND),
        lambda: talk.save(tmp_path / "half"),
        lambda: talk.load(tmp_path / "whole"),
    ):
        with pytest.raises(PromptError, match="is not complete"):
            misuse()
    whole = stream.finish()
    assert whole.token_ids == llama_loom.generate(FIRST, max_new_tokens=9).token_ids


# --- failures


@pytest.mark.parametrize("fault", ["score", "protect", "interrupt"])
def test_a_turn_that_fails_leaves_the_conversation_as_it_was(
    llama_loom: Loom, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = llama_loom.generate(FIRST, compressor=infokv(), max_new_tokens=4)
    expected = llama_loom.generate(
        SECOND, after=llama_loom.generate(FIRST, compressor=infokv(), max_new_tokens=4), max_new_tokens=6
    )
    if fault == "protect":
        with pytest.raises(MethodError, match="lie outside the cache's 74"):
            llama_loom.generate(SECOND, after=first, protect=[range(60, 99)])
    else:
        error = KeyboardInterrupt if fault == "interrupt" else MethodError
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> Tensor:
                raise error("no")

            patch.setattr(compressors["infokv"], "score", fail)
            with pytest.raises(error, match="no"):
                llama_loom.generate(SECOND, after=first)
    assert talk_of(first).cache.num_rows == 53
    again = llama_loom.generate(SECOND, after=first, max_new_tokens=6)
    assert again.token_ids == expected.token_ids
    assert again.trace.compressions == expected.trace.compressions
    for name in ("entropy", "drift"):
        assert torch.equal(talk_of(again).cache.side[name], talk_of(expected).cache.side[name])


def test_two_requests_in_threads_give_what_they_give_alone(llama_loom: Loom) -> None:
    def ask(seed: int) -> tuple[list[int], list[Any], list[list[list[int]]]]:
        method = infokv(keep=0.3) if seed % 2 else as_compressor("h2o", {"keep": 0.5})
        growing = as_compressor("rpc", {"keep": 0.25, **SCHEDULE}, phase="decode")
        answer = llama_loom.generate(
            random_ids(40 + seed, seed), compressor=method, decode_compressor=growing, max_new_tokens=20
        )
        return answer.token_ids, answer.trace.compressions, sets(rows_left(talk_of(answer).cache))

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(4)))
    assert together == alone
    assert len({tuple(tokens) for tokens, _, _ in alone}) == 4


# --- to a file and back


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "infokv"), ("gpt-oss", "infokv"), ("llama", "h2o"), ("llama", "expected_attention")],
)
def test_a_saved_conversation_goes_on_bit_identically(family: str, name: str, tmp_path: Path) -> None:
    """Compressed prompt and answer, saved; then a second prompt, compressed, and a growing answer."""
    loom = loom_of(family)
    options = SMALL if name == "infokv" else {"keep": 0.4}
    growing = {"keep": 0.25, **SCHEDULE} | ({"k": 20} if name == "infokv" else {})
    methods = {
        "compressor": as_compressor(name, options),
        "decode_compressor": as_compressor("infokv" if name == "infokv" else "rpc", growing, phase="decode"),
    }
    first = loom.generate(FIRST, **methods, protect=[range(2, 4)], max_new_tokens=20)
    talk_of(first).save(tmp_path / "talk")
    loaded = Conversation(loom.decoder)
    loaded.load(tmp_path / "talk")
    assert loaded.cache.num_bytes == talk_of(first).cache.num_bytes
    live = loom.generate(SECOND, after=first, max_new_tokens=20)
    again = loom.generate(SECOND, after=loaded, **methods, max_new_tokens=20)
    assert again.token_ids == live.token_ids
    assert again.trace.compressions == live.trace.compressions
    assert len(live.trace.compressions) == 2
    one, two = talk_of(live), talk_of(again)
    assert one.protected == two.protected == [range(2, 4)]
    for layer in range(3):
        assert torch.equal(one.cache.keys(layer), two.cache.keys(layer))
        assert torch.equal(one.cache.layers[layer].rows, two.cache.layers[layer].rows)
    for side, columns in one.cache.side.items():
        assert torch.equal(columns, two.cache.side[side])


def test_a_prompt_can_be_saved_before_it_is_answered(llama_loom: Loom, tmp_path: Path) -> None:
    talk = Conversation(llama_loom.decoder, compressor=infokv())
    talk.prefill(FIRST)
    talk.save(tmp_path / "whole")
    talk.compress()
    loaded = Conversation(llama_loom.decoder, compressor=infokv())
    loaded.load(tmp_path / "whole")
    loaded.compress()  # at once, before any forward of its own
    assert sets(rows_left(loaded.cache)) == sets(rows_left(talk.cache))
    assert torch.equal(loaded.prefill(SECOND), talk.prefill(SECOND))


def test_what_was_recorded_is_saved_with_it(llama_loom: Loom, tmp_path: Path) -> None:
    """Else a method would take signals that nobody recorded for zeros."""
    plain_talk = talk_of(llama_loom.generate(FIRST, max_new_tokens=2))
    plain_talk.save(tmp_path / "bare")
    with pytest.raises(MethodError, match="h2o needs what was not recorded"):
        Conversation(llama_loom.decoder, compressor=as_compressor("h2o")).load(tmp_path / "bare")
    loaded = Conversation(llama_loom.decoder)
    loaded.load(tmp_path / "bare")
    with pytest.raises(MethodError, match="infokv needs what was not recorded"):
        llama_loom.generate(SECOND, after=loaded, compressor=infokv())
    assert llama_loom.generate(SECOND, after=loaded, compressor="knorm", max_new_tokens=2).token_ids


def test_loading_replaces_all_that_a_conversation_held(llama_loom: Loom, tmp_path: Path) -> None:
    method = as_compressor("expected_attention", {"keep": 0.5})
    talk_of(llama_loom.generate(FIRST, compressor=method, max_new_tokens=2)).save(tmp_path / "talk")
    used = talk_of(llama_loom.generate(SECOND, compressor=method, max_new_tokens=5))
    used.load(tmp_path / "talk")
    fresh = Conversation(llama_loom.decoder, compressor=method)
    fresh.load(tmp_path / "talk")
    for one, two in zip(used.observer.moments(1), fresh.observer.moments(1), strict=True):
        assert torch.equal(one, two)
    assert used.cache.token_ids.tolist() == fresh.cache.token_ids.tolist()


def foreign(text: str) -> bytes:
    """A safetensors file that says this of itself."""
    return safetensors.torch.save({"a": torch.zeros(1)}, {"kvloom": text})


def test_files_that_are_refused(llama_loom: Loom, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    talk_of(llama_loom.generate(FIRST, compressor=infokv(), max_new_tokens=2)).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["talk"], "nothing is left beside it"
    whole, talk = path.read_bytes(), Conversation(llama_loom.decoder)
    with pytest.raises(StoreError, match="was saved by another model"):
        Conversation(loom_of("mistral").decoder).load(path)
    flipped = bytearray(whole)
    flipped[-100] ^= 4
    for content, message in (
        (whole[:-200], "is not a conversation that kvloom saved"),
        (whole[:20], "is not a conversation that kvloom saved"),
        (b"", "is not a conversation that kvloom saved"),
        (b"text" * 50, "is not a conversation that kvloom saved"),
        (bytes(flipped), "it is damaged"),
        (whole.replace(b"conversation 1", b"conversation 9"), "its format is"),
        (whole.replace(b"num_summed", b"num_sunned"), "it is damaged"),
        *((foreign(text), "is not a conversation that kvloom saved") for text in ("[]", "null", "[" * 10**5)),
    ):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=message):
            talk.load(path)
    assert talk.cache.num_rows == 0, "nothing was taken from them"
    with pytest.raises(StoreError, match="there is no saved conversation"):
        talk.load(tmp_path / "none")
    with pytest.raises(StoreError, match="cannot write"):
        talk.save(tmp_path / "no folder" / "talk")


def test_sampling_goes_on_as_it_would(llama_loom: Loom) -> None:
    """A conversation changes no draw: the same seed gives what the engine's own decoding gives."""
    from kvloom.generate import generate

    drawn = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12}
    got = llama_loom.generate(FIRST, compressor="knorm", options={"keep": 1}, **drawn)
    cache = llama_loom.decoder.new_cache(0)
    logits = llama_loom.decoder.forward(FIRST, torch.arange(50), cache, num_new=50)
    own = list(generate(llama_loom.decoder, cache, logits, Sampling(**drawn), frozenset()))
    assert got.token_ids == own
