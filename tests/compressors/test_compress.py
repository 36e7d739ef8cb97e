"""The contract of every compressor, and what `compress` promises whatever the score."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compressing import compressed, kept, prefilled
from plain_forward import random_ids, rows_left, sets
from tiny_models import DOCUMENTS, FAMILIES, FLOAT32, QUESTION, build, difference, loom_of
from torch import Tensor

import kvloom.compressors
from kvloom.cache_probe import CacheProbe
from kvloom.compressors import Compressor, as_compressor, compress, compressors
from kvloom.compressors.compress import best_places
from kvloom.errors import MethodError
from kvloom.observe import Observer, Records

if TYPE_CHECKING:
    from kvloom.conversation import Conversation
    from kvloom.loom import Loom

PROMPT = sorted(name for name in compressors if "prefill" in compressors[name].phases)
ANSWER = sorted(name for name in compressors if "decode" in compressors[name].phases)
SMALL: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 8},
    "pyramidkv": {"window": 8},
    "infokv": {"window": 8},
    "random": {"last": 8},
}


@dataclass(frozen=True, kw_only=True)
class Given(Compressor):
    """A score by hand, one number for each place, the same in every layer and head."""

    numbers: tuple[float, ...] = ()
    name = "given"  # type: ignore[misc]

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        return torch.tensor([self.numbers])


def state(talk: Conversation) -> list[Tensor]:
    cache = talk.cache
    held = [cache.token_ids, cache.positions, *cache.side.values(), *rows_left(cache)]
    for layer in range(len(cache.layers)):
        held += [cache.keys(layer).clone(), cache.values(layer).clone()]
    return held


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", PROMPT)
def test_contract(name: str, llama_loom: Loom) -> None:
    """Shape and type of scores, budget, determinism, order, the first set whatever ran before, the recipe."""
    ids, method = random_ids(80), compressors[name](keep=0.3, **SMALL.get(name, {}))
    talk = prefilled(llama_loom, ids, method)
    probe = CacheProbe(talk.cache, talk.observer)
    for layer in range(3):
        score = method.score(probe, layer)
        assert score.dtype == torch.float32
        assert score.shape in ((2, 80), (1, 80))
    before = [talk.cache.keys(layer).clone() for layer in range(3)]
    done = talk.compress()
    assert done is not None
    assert (sum(done.kept), done.budget, done.held, done.note) == (72, 24, [80] * 3, "")
    for layer, rows in enumerate(rows_left(talk.cache)):
        assert (rows.diff(dim=1) > 0).all()
        assert talk.cache.key_positions(layer).tolist() == rows.tolist()
        for head in range(2):
            assert torch.equal(talk.cache.keys(layer)[head], before[layer][head, rows[head]])
    assert (talk.cache.num_rows, talk.cache.next_position) == (80, 80)
    assert kept(llama_loom, ids, method) == sets(rows_left(talk.cache)), "the same again"
    named = {type(method).__name__: type(method)}
    assert eval(repr(method), vars(kvloom.compressors) | named) == method, "the repr is the recipe"
    assert done.method == repr(method)


@pytest.mark.parametrize("name", sorted(compressors))
@pytest.mark.parametrize("keep", [0, -0.1, 1.0001, float("nan"), float("inf"), True, "0.4"])
def test_keep_out_of_range_is_refused(name: str, keep: Any) -> None:
    with pytest.raises(MethodError, match=f"{name}: keep is the share of tokens to keep, above 0 and at"):
        compressors[name](keep=keep)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("snapkv", "window", 0),
        ("snapkv", "window", 2.5),
        ("snapkv", "kernel", 2),
        ("snapkv", "pool", "mean"),
        ("pyramidkv", "beta", 1),
        ("streaming", "sinks", -1),
        ("random", "seed", -1),
        ("random", "last", True),
        ("h2o", "recent_share", 1.5),
        ("expected_attention", "ahead", 0),
        ("expected_attention", "epsilon", float("nan")),
        ("r-kv", "mix", -0.1),
    ],
)
def test_options_out_of_range_are_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(MethodError, match=option):
        compressors[name](**{option: value})


def test_names_instances_and_phases() -> None:
    assert as_compressor("knorm", {"keep": "0.25"}) == compressors["knorm"](keep=0.25)
    with pytest.raises(MethodError, match="did you mean 'infokv'"):
        as_compressor("infokw")
    with pytest.raises(MethodError, match="did you mean 'keep'"):
        as_compressor("knorm", {"kep": 0.2})
    with pytest.raises(MethodError, match="a compressor is a name or an instance"):
        as_compressor(0.4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an instance has its own"):
        as_compressor(compressors["knorm"](), {"keep": 0.2})
    for name in compressors:
        for phase, group in (("prefill", PROMPT), ("decode", ANSWER)):
            if name in group:
                assert as_compressor(name, phase=phase).name == name
            else:
                with pytest.raises(MethodError, match="compresses"):
                    as_compressor(name, phase=phase)


def test_one_registration_per_file() -> None:
    folder = Path(kvloom.compressors.__file__).parent
    for file in folder.glob("*.py"):
        expected = 0 if file.stem in ("__init__", "base", "chunks", "compress", "decoding") else 1
        assert file.read_text().count("@compressors.register(") == expected, file.name


# --- what stays, whatever the score


def test_the_best_stay_ties_go_to_the_earlier_place_and_order_is_kept() -> None:
    score = torch.tensor([[1.0, 5, 1, 5, 1, 9], [0, 0, 0, 0, 0, 0]])
    none = torch.zeros(6, dtype=torch.bool)
    assert best_places(score, none, 2).tolist() == [[1, 5], [0, 1]]
    assert best_places(score, none, 4).tolist() == [[0, 1, 3, 5], [0, 1, 2, 3]]
    last = torch.arange(6) == 4
    assert best_places(score, last, 2).tolist() == [[4, 5], [0, 4]]
    by_head = torch.stack([last, torch.arange(6) == 5])
    assert best_places(score[:1], by_head, 2).tolist() == [[4, 5], [1, 5]]


def test_not_even_an_infinite_score_takes_the_place_of_what_stays() -> None:
    score = torch.full((1, 5), torch.inf)
    assert best_places(score, torch.arange(5) >= 3, 2).tolist() == [[3, 4]]
    assert best_places(-score, torch.arange(5) >= 4, 2).tolist() == [[0, 4]]


def test_half_precision_scores_are_ranked_as_they_are(llama_loom: Loom) -> None:
    score = torch.tensor([[2.0, 65504.0, -65504.0, 3.0]], dtype=torch.float16)
    assert best_places(score, torch.zeros(4, dtype=torch.bool), 2).tolist() == [[1, 3]]


def test_equal_scores_leave_the_first_rows(llama_loom: Loom) -> None:
    talk, _ = compressed(llama_loom, random_ids(20), Given(keep=0.25, numbers=(0.5,) * 20))
    assert sets(rows_left(talk.cache)) == [[[0, 1, 2, 3, 4]] * 2] * 3


def test_all_equal_attention_keeps_the_earliest_by_snapkv() -> None:
    """Queries of 0 attend to all alike; the zeros beyond the ends lower the first two by the pool of 5."""
    loom = loom_of("llama")
    with torch.no_grad():
        for layer in loom.model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    got = kept(loom, random_ids(40), "snapkv", keep=0.5, window=8)
    assert got == [[[*range(2, 14), *range(32, 40)]] * 2] * 3


def test_protected_rows_stay(llama_loom: Loom) -> None:
    ids, method = random_ids(40), Given(keep=0.3, numbers=tuple(range(40)))
    talk = prefilled(llama_loom, ids, method)
    talk.protect([range(3, 6), range(10, 11)])
    talk.compress()
    assert sets(rows_left(talk.cache))[2] == [[3, 4, 5, 10, *range(32, 40)]] * 2
    talk = prefilled(llama_loom, ids, method)
    talk.protect([range(30)])
    done = talk.compress()
    assert done is not None
    assert sets(rows_left(talk.cache))[0] == [[*range(30), 39]] * 2
    assert done.note == "kept 31 tokens instead of 12: 30 are protected, and one more stays"
    for bad in ([range(30, 41)], [range(41, 42)]):
        talk = prefilled(llama_loom, ids, method)
        talk.protect(bad)
        before = state(talk)
        with pytest.raises(MethodError, match="lie outside the cache's 40"):
            talk.compress()
        assert same(state(talk), before)
    for bad in ([range(-1, 3)], [range(5, 3)], [range(0, 9, 2)]):
        with pytest.raises(MethodError, match="protected rows are ranges from 0 on"):
            talk.protect(bad)


def test_a_layer_that_must_keep_more_than_its_share_takes_it_from_the_largest(llama_loom: Loom) -> None:
    """24 on average are 40, 24 and 8; with 12 protected the last layer keeps 13."""
    talk = prefilled(llama_loom, random_ids(80), as_compressor("pyramidkv", {"keep": 0.3, "window": 8}))
    talk.protect([range(4)])
    done = talk.compress()
    assert done is not None
    assert done.kept == [35, 24, 13]


@pytest.mark.parametrize(("num", "left"), [(1, 1), (15, 15), (16, 16), (17, 17), (18, 17), (60, 24)])
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "infokv"])
def test_prompts_about_as_short_as_the_window(llama_loom: Loom, name: str, num: int, left: int) -> None:
    """At least the window and one more; where that is all there is, nothing is touched, and the note says
    so.
    """
    talk, done = compressed(llama_loom, random_ids(num), name, keep=0.4, window=16)
    if name != "pyramidkv" or num < 60:
        assert done.kept == [left] * 3
    if left == num:
        assert done.note == f"not compressed: {num} tokens, of which {min(num, 16)} are protected"
        assert all(layer.rows is None for layer in talk.cache.layers)
    assert done.note or left > 17


@pytest.mark.parametrize("name", PROMPT)
@pytest.mark.parametrize("num", [1, 2, 5, 7])
def test_the_shortest_prompts_can_be_compressed_by_all(llama_loom: Loom, name: str, num: int) -> None:
    """Never an empty cache, and the answer goes on."""
    answer = llama_loom.generate(
        random_ids(num), compressor=name, options={"keep": 1e-9, **SMALL.get(name, {})}, max_new_tokens=3
    )
    assert len(answer.token_ids) == 3
    assert min(answer.trace.compressions[0]["kept"]) >= 1


def test_the_tiniest_keep_leaves_one_token_more_than_is_protected(llama_loom: Loom) -> None:
    assert compressed(llama_loom, random_ids(50), "knorm", keep=1e-9)[1].kept == [1] * 3
    assert compressed(llama_loom, random_ids(50), "streaming", keep=1e-9)[1].kept == [5] * 3
    done = compressed(llama_loom, random_ids(50), "infokv", keep=1e-9, window=8)[1]
    assert (done.kept, done.note) == (
        [9] * 3,
        "kept 9 tokens instead of 0: 8 are protected, and one more stays",
    )


@pytest.mark.parametrize("name", PROMPT)
def test_keep_1_changes_no_bit(llama_loom: Loom, name: str) -> None:
    ids = random_ids(70)
    plain = llama_loom.generate(ids, max_new_tokens=8)
    whole = llama_loom.generate(ids, compressor=name, options={"keep": 1}, max_new_tokens=8)
    assert whole.token_ids == plain.token_ids
    assert whole.trace.compressions == []
    assert same(state(whole.continuation), state(plain.continuation))
    talk = prefilled(llama_loom, ids, compressors[name](keep=0.5))  # observed, then told to keep all
    before = state(talk)
    done = compress(compressors[name](keep=1), talk.cache, talk.observer)
    assert done.kept == [70] * 3
    assert same(state(talk), before)


# --- what goes wrong


class Failing(Given):
    name = "failing"  # type: ignore[misc]

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        if layer == 2:
            return self.fail(probe)
        return torch.zeros(1, probe.held(layer))

    def fail(self, probe: CacheProbe) -> Tensor:
        raise RuntimeError("no score")


class NotANumber(Failing):
    def fail(self, probe: CacheProbe) -> Tensor:
        return torch.tensor([0.0, torch.nan, torch.nan] + [0.0] * (probe.held(2) - 3))[None]


class Short(Failing):
    def fail(self, probe: CacheProbe) -> Tensor:
        return torch.zeros(probe.held(2))


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (Failing(), RuntimeError, "no score"),
        (NotANumber(), MethodError, "score of layer 2 is not a number for 2 places"),
        (Short(), MethodError, r"score of layer 2 has shape \(30,\), it must be \(2, 30\) or \(1, 30\)"),
    ],
)
def test_a_score_that_fails_leaves_the_cache_whole(
    llama_loom: Loom, method: Compressor, error: type[Exception], message: str
) -> None:
    """The last layer's fails, when the first two could have been compressed."""
    talk = prefilled(llama_loom, random_ids(30), method)
    before = state(talk)
    with pytest.raises(error, match=message):
        talk.compress()
    assert same(state(talk), before)
    expected = llama_loom.generate(random_ids(30), max_new_tokens=5).token_ids
    with pytest.raises(error, match=message):
        llama_loom.generate(random_ids(30), compressor=method, max_new_tokens=5)
    assert llama_loom.generate(random_ids(30), max_new_tokens=5).token_ids == expected


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("infokv", "its last queries"),
        ("snapkv", "its last queries"),
        ("tova", "its last queries"),
        ("h2o", "the attention of some queries"),
        ("expected_attention", "the moments of its queries"),
    ],
)
def test_a_spliced_cache_lacks_what_was_not_observed(llama_loom: Loom, name: str, lacking: str) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    cache = llama_loom.splice(prompt)
    observer = Observer(llama_loom.decoder, cache, Records())
    with pytest.raises(MethodError, match=f"this cache lacks {lacking}"):
        compress(compressors[name](**SMALL.get(name, {})), cache, observer)
    assert cache.get_seq_length() == len(prompt.context_ids)
    assert compress(compressors["keydiff"](keep=0.5), cache, observer).kept == [cache.num_rows // 2] * 3


@pytest.mark.parametrize("name", ["infokv", "snapkv", "h2o"])
def test_rows_that_another_forward_appended_are_known_to_be_unknown(llama_loom: Loom, name: str) -> None:
    """Signals of a neighbour, or none at all, would be worse than an error."""
    method = compressors[name](keep=0.5, **SMALL.get(name, {}))
    talk = prefilled(llama_loom, random_ids(30), method)
    llama_loom.decoder.follow(random_ids(6), talk.cache)
    with pytest.raises(MethodError, match="this cache lacks"):
        talk.compress()
    talk.prefill(random_ids(20))
    if name == "snapkv":  # the last queries are all that it needs
        done = talk.compress()
        assert done is not None
        assert done.kept == [28] * 3
    else:
        with pytest.raises(MethodError, match=r"this cache lacks the (entropy|attention)"):
            talk.compress()


# --- other number formats


@pytest.mark.parametrize("name", PROMPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(name: str, dtype: torch.dtype) -> None:
    loom = half_loom(dtype)
    talk, done = compressed(loom, random_ids(80), name, keep=0.5, **SMALL.get(name, {}))
    assert sum(done.kept) == 120
    assert talk.cache.keys(0).dtype == dtype
    assert talk.step(65).isfinite().all()
    for signal in talk.cache.side.values():
        assert signal.dtype == torch.float32
        assert signal.isfinite().all()


def half_loom(dtype: torch.dtype) -> Loom:
    from byte_tokenizer import ByteTokenizer

    from kvloom.loom import Loom

    return Loom(build(FAMILIES["llama"]).to(dtype), ByteTokenizer(eos_token=None))


def test_scores_beyond_float16_do_not_overflow() -> None:
    """q.k / sqrt(D) of 20,000 is no trouble, q.k of 80,000 would be."""
    loom = half_loom(torch.float16)
    talk = prefilled(loom, random_ids(40), as_compressor("h2o", {"keep": 0.5}))
    talk.observer.queries = {0: torch.full((4, 1, 16), 100.0, dtype=torch.float16)}
    talk.cache.layers[0].key_buffer.fill_(50.0)
    weights = CacheProbe(talk.cache, talk.observer).window(0, 1)
    assert torch.allclose(weights, torch.full((2, 2, 1, 40), 1 / 40))


def test_a_window_larger_than_what_was_observed_is_what_was_observed(llama_loom: Loom) -> None:
    """Of a context that another forward computed only the question's queries are known: snapkv scores by
    these, and protects its whole window.
    """
    ids, num_asked = random_ids(60), 5
    cache = llama_loom.decoder.new_cache(len(ids))
    llama_loom.decoder.follow(ids[:-num_asked], cache)
    method = as_compressor("snapkv", {"keep": 0.5, "window": 16, "kernel": 1})
    observer = Observer(llama_loom.decoder, cache, method.records)
    probe = CacheProbe(cache, observer)
    with pytest.raises(MethodError, match="this cache lacks its last queries"):
        probe.window(0, 16)
    observer.run(ids[-num_asked:])
    probe = CacheProbe(cache, observer)
    whole = prefilled(llama_loom, ids, method)
    expected = CacheProbe(whole.cache, whole.observer).window(1, 16)[:, :, -num_asked:]
    assert probe.window(1, 16).shape == (2, 2, num_asked, 60)
    assert difference(probe.window(1, 16), expected) < FLOAT32
    score = method.score(probe, 1)
    assert difference(score, expected.mean((1, 2)) * (torch.arange(60) < 44)) < FLOAT32
    assert compress(method, cache, observer).kept == [30] * 3
    assert rows_left(cache)[1][:, -16:].tolist() == [list(range(44, 60))] * 2
