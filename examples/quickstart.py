"""Index documents once, then ask about them in any order; only a few rows are computed per question."""

from kvloom import Document, InfoFlow, Loom

DOCUMENTS = [
    Document(
        "The Jacquard machine was shown in Lyon in 1804. It is controlled by a chain of punched cards.",
        title="Jacquard",
    ),
    Document("Ada Lovelace wrote that the Analytical Engine weaves algebraical patterns.", title="Lovelace"),
    Document(
        "Charles Babbage owned a portrait of Jacquard woven in silk with 24,000 cards.", title="Babbage"
    ),
]


def main() -> None:
    loom = Loom.from_pretrained("bundled:smollm2", store="memory:1GiB")
    loom.index(DOCUMENTS)

    answer = loom.answer(
        "What controls the Jacquard machine?", DOCUMENTS, selector=InfoFlow(ratio=0.15), max_new_tokens=24
    )
    print(answer.text)
    print(f"{answer.trace.reused_tokens} tokens reused, {answer.trace.recomputed_rows} rows computed again")

    # The same documents in another order, streamed; nothing is prefilled again.
    for piece in loom.stream("Who owned a woven portrait?", DOCUMENTS[::-1], max_new_tokens=24):
        print(piece, end="", flush=True)
    print()

    # The repaired cache also goes straight into transformers' own generate.
    question = "Who wrote about algebraical patterns?"
    cache = loom.context(question, DOCUMENTS)
    question_ids = loom.prompt(question, DOCUMENTS).question_ids
    made = loom.model.generate(**cache.generate_kwargs(question_ids), max_new_tokens=24, do_sample=False)
    print(loom.tokenizer.decode(made[0, len(question_ids) :].tolist()))


if __name__ == "__main__":
    main()
