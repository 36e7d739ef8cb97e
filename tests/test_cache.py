from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import DOCUMENTS, FLOAT32, QUESTION, difference

from kvloom.cache import UNKNOWN_TOKEN, KVShape, SplicedCache

if TYPE_CHECKING:
    from kvloom.loom import Loom


def filled(num_rows: int = 6, capacity: int = 8) -> SplicedCache:
    """Keys of layer l, head h, row t are all 100 l + 10 h + t; values are their negatives."""
    cache = SplicedCache([KVShape(2, 4, 3)] * 2, capacity, dtype=torch.float32)
    rows = cache.announce(torch.arange(num_rows) + 50, torch.arange(num_rows))
    cache.allocate()
    for layer in range(2):
        numbers = (100 * layer + 10 * torch.arange(2)[:, None] + torch.arange(num_rows)).float()[..., None]
        cache.write(layer, rows, numbers.expand(-1, -1, 4), -numbers.expand(-1, -1, 3))
    return cache


def new_rows(*numbers: float) -> tuple[torch.Tensor, torch.Tensor]:
    column = torch.tensor(numbers)[None, None, :, None]
    return column.expand(1, 2, -1, 4).contiguous(), -column.expand(1, 2, -1, 3).contiguous()


def test_keys_and_values_are_views_of_the_buffers() -> None:
    cache = filled()
    assert cache.keys(1)[1, :, 0].tolist() == [110, 111, 112, 113, 114, 115]
    assert cache.values(0)[0, :, 0].tolist() == [0, -1, -2, -3, -4, -5]
    assert cache.keys(0).data_ptr() == cache.layers[0].key_buffer.data_ptr()
    assert (cache.num_rows, cache.get_seq_length(), cache.next_position) == (6, 6, 6)
    assert cache.num_bytes == 2 * 2 * 6 * (4 + 3) * 4


def test_overwriting_writes_over_rows_then_appends_and_stops_at_the_end() -> None:
    cache = filled()
    buffer = cache.layers[0].key_buffer.data_ptr()
    cache.announce(torch.tensor([7]), torch.tensor([6]))
    with cache.overwriting(torch.tensor([1, 4])):
        keys, _ = cache.update(*new_rows(-1.0, -4.0, -6.0), 0)
    assert keys[0, 0, :, 0].tolist() == [0, -1, 2, 3, -4, 5, -6]
    assert cache.values(0)[1, :, 0].tolist() == [-10, 1, -12, -13, 4, -15, 6]
    assert cache.keys(1)[0, :, 0].tolist() == [100, 101, 102, 103, 104, 105], (
        "the other layer waits for its own rows"
    )
    assert cache.layers[0].key_buffer.data_ptr() == buffer, "nothing was allocated"
    assert cache.layers[0].overwrite is None


def test_an_exception_inside_overwriting_leaves_no_rows_behind() -> None:
    cache = filled()
    with pytest.raises(KeyboardInterrupt), cache.overwriting(torch.tensor([0])):
        raise KeyboardInterrupt
    assert all(layer.overwrite is None for layer in cache.layers)


def test_untouched_takes_back_what_was_appended_even_after_an_exception() -> None:
    cache = filled()
    before = [(cache.keys(layer).clone(), cache.values(layer).clone()) for layer in range(2)]
    with pytest.raises(RuntimeError, match="half way"), cache.untouched():  # noqa: PT012
        cache.announce(torch.tensor([9, 9]), torch.tensor([6, 7]), exact=True)
        cache.update(*new_rows(1, 2), 0)
        assert cache.num_rows == 8
        raise RuntimeError("half way")
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(cache.keys(layer), keys)
        assert torch.equal(cache.values(layer), values)
    assert (cache.num_rows, cache.next_position, len(cache.exact)) == (6, 6, 6)


def test_buffers_grow_when_more_is_appended_than_was_reserved() -> None:
    cache = filled(capacity=6)
    for number in range(40):
        cache.update(*new_rows(200.0 + number), 0)
        cache.update(*new_rows(200.0 + number), 1)
    assert cache.keys(0)[0, :, 0].tolist() == [*range(6), *range(200, 240)]
    assert cache.layers[0].key_buffer.shape[2] < 80


def test_rows_that_a_foreign_forward_appends_continue_the_positions() -> None:
    cache = filled()
    for layer in range(2):
        cache.update(*new_rows(1, 2), layer)
    assert cache.token_ids.tolist()[-2:] == [UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert cache.positions.tolist() == list(range(8))
    assert cache.next_position == 8


def test_keep_drops_rows_per_head_and_keeps_their_positions() -> None:
    cache = filled()
    before = cache.layers[0].key_buffer.untyped_storage().nbytes()
    cache.keep(0, torch.tensor([[0, 2, 5], [1, 3, 4]]))
    assert cache.keys(0)[:, :, 0].tolist() == [[0, 2, 5], [11, 13, 14]]
    assert cache.values(0)[:, :, 0].tolist() == [[0, -2, -5], [-11, -13, -14]]
    assert cache.key_positions(0).tolist() == [[0, 2, 5], [1, 3, 4]]
    assert cache.keys(1).shape[1] == 6
    assert cache.next_position == 6
    assert cache.layers[0].key_buffer.untyped_storage().nbytes() < before, "memory is freed"
    cache.keep(0, torch.tensor([[1, 2]]))
    assert cache.key_positions(0).tolist() == [[2, 5], [3, 4]]
    with pytest.raises(ValueError, match=r"lie in 0\.\.1"):
        cache.keep(0, torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="ascending"):
        cache.keep(0, torch.tensor([[1, 0]]))


def test_a_question_after_dropped_rows_stands_at_its_true_position(llama_loom: Loom) -> None:
    """Dropping rows equals masking them: the oracle is a full cache whose dropped keys are cut out by
    hand.
    """
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    kept = torch.arange(0, len(prompt.context_ids), 2)
    cache = llama_loom.splice(prompt)
    reference = llama_loom.splice(prompt)
    for layer in range(3):
        cache.keep(layer, kept[None])
    logits = llama_loom.recompute(cache, torch.arange(0), prompt)
    assert cache.next_position == prompt.num_tokens
    assert cache.key_positions(0).shape == (2, len(kept) + len(prompt.question_ids))
    # the same through rows moved out of every query's sight
    reference.positions = reference.positions.clone()
    dropped = torch.ones(reference.num_rows, dtype=torch.bool)
    dropped[kept] = False
    reference.positions[dropped] = 10**6
    assert difference(logits, llama_loom.recompute(reference, torch.arange(0), prompt)) < FLOAT32


def test_generate_goes_on_after_dropped_rows(llama_loom: Loom) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    kept = torch.stack([torch.arange(0, 120, 2), torch.arange(0, 120, 2) + 3])
    ours, theirs = llama_loom.splice(prompt), llama_loom.splice(prompt)
    for layer in range(3):
        ours.keep(layer, kept)
        theirs.keep(layer, kept)
    made = llama_loom.model.generate(
        **theirs.generate_kwargs(prompt.question_ids), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    logits = llama_loom.recompute(ours, torch.arange(0), prompt)
    expected: list[int] = []
    for _ in range(5):
        expected.append(int(logits.argmax()))
        place = torch.tensor([ours.next_position])
        logits = llama_loom.decoder.forward(torch.tensor(expected[-1:]), place, ours, num_new=1)
    assert made[0, len(prompt.question_ids) :].tolist() == expected


def test_what_a_cache_of_one_sequence_cannot_do_is_refused_and_changes_nothing(llama_loom: Loom) -> None:
    cache = llama_loom.context(QUESTION, DOCUMENTS)
    ids = llama_loom.prompt(QUESTION, DOCUMENTS).question_ids
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = llama_loom.model.generate(
        **llama_loom.context(QUESTION, DOCUMENTS).generate_kwargs(ids), **options
    )
    before = cache.num_rows, cache.get_seq_length(), cache.next_position
    with pytest.raises(ValueError, match="one sequence"):
        llama_loom.model.generate(**cache.generate_kwargs(ids), num_beams=2, **options)
    assert (cache.num_rows, cache.get_seq_length(), cache.next_position) == before
    assert torch.equal(llama_loom.model.generate(**cache.generate_kwargs(ids), **options), expected)
    for change in (cache.reset, lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="splice a new one"):
            change()


@pytest.mark.parametrize(
    "ids", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3), torch.zeros(0, dtype=torch.int64)]
)
def test_only_token_ids_of_one_sequence_go_on(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="input_ids must be"):
        filled().generate_kwargs(ids)


def test_a_used_cache_or_that_of_another_prompt_is_refused(llama_loom: Loom) -> None:
    prompt, other = llama_loom.prompt(QUESTION, DOCUMENTS), llama_loom.prompt(QUESTION, DOCUMENTS[::-1])
    cache = llama_loom.splice(prompt)
    with pytest.raises(ValueError, match="splice the prompt anew"):
        llama_loom.select(cache, other, "infoflow")
    llama_loom.recompute(cache, torch.arange(0), prompt)
    for again in (
        lambda: llama_loom.recompute(cache, torch.arange(0), prompt),
        lambda: llama_loom.select(cache, prompt, "infoflow"),
    ):
        with pytest.raises(ValueError, match="nothing after them"):
            again()


@pytest.mark.parametrize("rows", [torch.tensor([True, False]), torch.tensor([1.5]), [1, 2], torch.tensor(3)])
def test_rows_are_row_numbers(llama_loom: Loom, rows: Any) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    with pytest.raises(ValueError, match="one-dimensional tensor of row numbers"):
        llama_loom.recompute(llama_loom.splice(prompt), rows, prompt)


def test_rows_out_of_range_or_repeated_are_refused(llama_loom: Loom) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    cache = llama_loom.splice(prompt)
    for rows, message in (
        ([cache.num_rows], "must lie in"),
        ([-1], "must lie in"),
        ([3, 3], "must not repeat"),
    ):
        with pytest.raises(ValueError, match=message):
            llama_loom.recompute(cache, torch.tensor(rows), prompt)


def test_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        filled().update(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 3), 0)
