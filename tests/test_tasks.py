"""Tasks with an answer: their texts, read by independent means, accuracy, and the effective context.

The general tests are of every task whose class says `accuracy`, so a new one needs no edit here.
"""

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

import pytest
import torch

from conf.errors import UserError
from conf.registry import choices, load_kind, yaml_values
from data.corpora import mqar, recall
from data.corpus import HeldOut
from measure import tasks
from measure.curves import Curve, read_curve
from measure.report import NO_LENGTH, Accuracy, effective_context, whole_answers
from measure.tasks import Piece
from measure.tasks.placed import NOTHING, PlacedAnswer
from tests.helpers import ROOT, Words, any_task_corpus, held_out, held_out_text, line_of, random_lines

KINDS = {name: yaml_values("task", name)["kind"] for name in choices("task")}
WITH_ANSWER = [name for name, kind in KINDS.items() if load_kind("measure.tasks", kind, "build", "task").accuracy]
LENGTHS = (128, 300)


def built(name: str, corpus: HeldOut | None = None, documents: int = 5, **knobs: object) -> PlacedAnswer:
    """The task of this yaml, with other values of some knobs."""
    values = {**yaml_values("task", name), **knobs}
    return tasks.build(values, corpus or any_task_corpus(), 512, documents)  # ty: ignore[invalid-return-type]


def texts_of(piece: Piece) -> list[list[int]]:
    """The inputs with the last target: n + 1 tokens each."""
    return torch.cat((piece.tokens, piece.targets[:, -1:]), dim=1).tolist()


def texts(task: PlacedAnswer, n: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """(distance, n + 1 tokens, scored tokens) of every text."""
    for piece in task.pieces(n):
        for tokens, scored in zip(texts_of(piece), piece.scored_targets().tolist(), strict=True):
            yield piece.distance, tokens, scored


def places(part: list[int], tokens: list[int]) -> list[int]:
    """Where `part` occurs in `tokens`."""
    return [i for i in range(len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part]


def token(letter: str) -> int:
    """The token of a letter after a space."""
    return any_task_corpus().encoding.encode_ordinary(f"# {letter}")[-1]


def decoded(tokens: Sequence[int]) -> str:
    return any_task_corpus().encoding.decode(tokens)


# ---- every task with an answer ----


@pytest.mark.parametrize("name", WITH_ANSWER)
def test_texts_have_n_tokens_before_their_last_one_and_distances_that_fit(name):
    task = built(name)
    for n in (task.minimum, *LENGTHS):
        for piece in task.pieces(n):
            assert piece.tokens.shape == (5, n) and piece.targets.shape == (5, len(task.scored))
            assert piece.scored.tolist() == task.scored and task.scored[-1]  # a text ends in its answer
        distances = [p.distance for p in task.pieces(n)]
        assert distances == sorted(set(distances)) and distances[0] >= 1 and distances[-1] <= n * 7 // 8
    assert task.distances(512)[-1] == 448
    assert task.chance == {"recall": 1 / 26, "mqar": 1 / 8}.get(name, 0)


@pytest.mark.parametrize("name", WITH_ANSWER)
def test_more_examples_begin_with_the_same_texts_and_all_texts_differ(name):
    few, many = built(name, documents=2), built(name, documents=6)
    for p, q in zip(few.pieces(300), many.pieces(300), strict=True):
        assert texts_of(p) == texts_of(q)[:2]
    all_texts = [tuple(tokens) for _, tokens, _ in texts(many, 300)]
    assert len(set(all_texts)) == len(all_texts)


def notes_and_lines() -> list[str]:
    """Random lines with the notes of all corpora that have some between them."""
    lines = random_lines(0, 400)
    for annotate, knob in ((recall.annotate, (1, 4)), (mqar.annotate, (8,))):
        lines = annotate(lines, random.Random(0), *knob).splitlines()
    return lines


@pytest.mark.parametrize("name", WITH_ANSWER)
def test_notes_of_the_held_out_documents_are_left_out_of_the_texts(name):
    lines = notes_and_lines()
    task = built(name, held_out_text(["\n".join(lines)] * 2))
    kept = [x for x in lines if not task.notes.fullmatch(x)]
    assert task.lines == [kept, kept] and (len(kept) < len(lines)) == (task.notes is not NOTHING)


@pytest.mark.parametrize("name", WITH_ANSWER)
def test_letters_of_two_tokens_are_avoided(name):
    task = built(name, held_out_text(map(corpus_text, range(3)), words := Words(two_tokens="ABCKabcq")))
    task.pieces(300)
    made = {part for part in words.numbers if re.fullmatch(" [A-Za-z]", part)}
    assert not made & {f" {c}" for c in "ABCKabcq"}


def corpus_text(seed: int) -> str:
    return "".join(f"{line}\n" for line in random_lines(seed, 200))


@pytest.mark.parametrize("name", WITH_ANSWER)
def test_a_tokenizer_without_letters_is_one_line_or_no_obstacle(name):
    """Of characters, as data.tokenizer=bytes: `# K` is three tokens."""
    corpus = held_out([list(map(ord, corpus_text(seed)))[:1500] for seed in range(3)])
    try:
        assert all(len(text) == 301 for piece in built(name, corpus).pieces(300) for text in texts_of(piece))
    except UserError as error:
        assert re.search(f"task={name}.*letters that are one token each.*data.tokenizer=bpe", str(error))


def test_copying_begins_where_its_nearest_distance_fits():
    task = built("copying", nearest=200)
    assert task.minimum == 400 and task.distances(400) == [200, 350]


def test_wrong_knobs_and_lines_without_a_token_for_each_part_are_refused():
    for knobs, right in (({"threshold": 0.0}, "above 0 and at most 1"), ({"queries": 9}, "from 1 to 8")):
        assert f"must be {right}" in line_of(lambda knobs=knobs: built("recall", **knobs))
    assert "does not give 4 tokens to '# K" in line_of(built("recall").one_token_each, "# K\n", 4)


# ---- the texts of each task ----


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("key, answer, distractors", [(1, 4, 8), (1, 4, 0), (3, 2, 4), (1, 1, 2)])
def test_the_note_to_recall_occurs_once_before_at_its_distance(n, key, answer, distractors):
    for distance, tokens, scored in texts(built("recall", key=key, answer=answer, distractors=distractors), n):
        size = 1 + key + answer
        note = tokens[-size:]
        assert re.fullmatch(f"#( [A-Z]){{{key}}}( [a-z]){{{answer}}}", decoded(note)) and note[-answer:] == scored
        assert places(note, tokens) == [n + 1 - size - distance, n + 1 - size]
        assert len(places(note[:2], tokens)) == 2  # no other note begins with its letter
        others = [x for x in decoded(tokens[1:]).splitlines()[1:] if recall.NOTE.fullmatch(x)]
        assert len(others) == 2 if distractors == 0 else len({*others}) >= min(3, distractors)


@pytest.mark.parametrize("n", LENGTHS)
def test_several_notes_are_asked_in_any_order(n):
    note, orders = 7, set()
    for distance, tokens, scored in texts(built("recall", queries=3, documents=12), n):
        asked = [*tokens[-3 * note + 1 :], token("x")]  # the end of the last line is not part of the text
        given = tokens[-3 * note + 1 - distance :][: 3 * note]
        after, before = ([part[i : i + note - 1] for i in range(0, 3 * note, note)] for part in (asked, given))
        assert sorted(after) == sorted(before) and all(len(places(x, tokens)) == 2 for x in after)
        assert scored == [t for x in after for t in x[2:]]
        assert all(re.match("# [A-Z]", decoded(x)) for x in after)
        orders.add(tuple(before.index(x) for x in after))
    assert len(orders) > 3


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("cue, answer", [(8, 16), (4, 1)])
def test_the_copied_passage_occurs_once_before_at_its_distance_in_another_document(n, cue, answer):
    documents, size = [d.tokens.tolist() for d in any_task_corpus().held_out], cue + answer
    for distance, tokens, scored in texts(built("copying", cue=cue, answer=answer), n):
        passage, last = tokens[-size:], n + 1 - size
        assert scored == passage[cue:] and places(passage, tokens) == [last - distance, last]
        around = [tokens[: last - distance], tokens[last - distance + size : last]]
        sources = {i for i, text in enumerate(documents) if places(passage, text)}
        others = {i for i, text in enumerate(documents) if all(places(part, text) for part in around)}
        assert len(sources) == 1 and others - sources


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("pairs, queries", [(8, 4), (3, 3), (1, 1), (26, 26)])
def test_each_asked_pair_is_in_the_table_once(n, pairs, queries):
    for distance, tokens, scored in texts(built("mqar", pairs=pairs, queries=queries), n):
        question = n - 2 * queries  # where the line of queries begins
        given, asked = decoded(tokens[question - distance :]).splitlines()[0], decoded(tokens[question:])
        assert given[0] == "#" and mqar.TABLE.fullmatch(given) and mqar.TABLE.fullmatch(asked)
        known = dict(re.findall("([A-Z]) ([a-z])", given))
        keys, values = zip(*re.findall("([A-Z]) ([a-z])", asked), strict=True)
        assert len(known) == pairs and len(set(keys)) == queries and [known[k] for k in keys] == list(values)
        assert scored == [token(value) for value in values]
        assert [x for x in decoded(tokens[1:]).splitlines()[1:] if mqar.TABLE.fullmatch(x)] == [given, asked]
        assert all(len(places([token(key)], tokens)) == 2 for key in keys)


# ---- effective context ----


def curve_of(hits: dict[int, list[float]], run: str = "a", label: str = "none") -> Curve:
    """A curve with these shares of right tokens of each example, n -> examples, at one distance."""
    first = read_curve(ROOT / "tests/data/rope-s0/eval/curve.jsonl").first
    about = {"run": run, "label": label, "train_ctx": 128, "task": "recall key=1"}
    made = [(n, h, distance) for n, h in hits.items() for distance in (None, 64)]
    return Curve([dataclasses.replace(first, n=n, hits=h, distance=distance, **about) for n, h, distance in made])


def test_an_answer_is_whole_at_each_distance_by_itself():
    assert whole_answers({"64": [1.0, 0.5], "128": [0.5, 1.0]}) == 50.0  # though no example has both


def test_effective_context_is_the_longest_length_up_to_which_all_are_solved():
    full, none = [1.0] * 10, [0.0] * 10
    for hits, want in (
        ({128: full, 256: full, 512: none}, 256),
        ({128: full, 256: none, 512: full}, 128),  # not past a gap
        ({128: [0.8] * 10, 256: [0.79] * 10}, 128),
        ({128: none, 256: full}, NO_LENGTH),
    ):
        assert effective_context(curve_of(hits), 0.8)[0] == want


def test_the_interval_of_the_effective_context_is_over_examples():
    """At 256 tokens 31 of 40 answers are right: by chance, other examples would reach 80 %, or fail at 128 as well."""
    some = [1.0] * 31 + [0.0] * 9
    n, low, high = effective_context(curve_of({128: [1.0] * 40, 256: some, 512: [0.0] * 40}), 0.8)
    assert (n, low, high) == (128, 128, 256)
    n, low, high = effective_context(curve_of({128: [1.0] * 33 + [0.0] * 7, 256: some, 512: some}), 0.8)
    assert n == 128 and low == NO_LENGTH and high == 512
    # the same examples are drawn at all lengths: where one fails at both, the lengths are solved together
    both = curve_of({128: some + [1.0] * 5, 256: some + [1.0] * 5})
    assert {effective_context(both, t)[0] for t in (0.7, 0.9)} == {256, NO_LENGTH}


def test_curves_of_different_lengths_are_described_by_their_own(capsys):
    full, none = [1.0] * 10, [0.0] * 10
    Accuracy(0.8).print_comparison([curve_of({128: none, 256: full}), curve_of({128: full, 512: full}, "long")])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    short, long = "< 128 [< 128, < 128]", ">= 512 [>= 512, >= 512]"
    assert lines[-2:] == [f"a none {short} {short}", f"long none {long} {long}"]
    Accuracy(0.8).print_comparison([curve_of({128: [0.5] * 10, 256: [0.4] * 10, 512: [0.45, 0.4] * 5})])
    whole, *_, effective = capsys.readouterr().out.split("whole answers right, %")[1].strip().splitlines()[1:]
    assert (
        whole.split() == ["a", "none", "0", "0", "0"]
        and effective.split()[2:] == "< 128 [< 128, < 128] 128 [128, 128]".split()
    )
