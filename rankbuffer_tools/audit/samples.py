"""Ask a judge about samples of the policy, in new presentations each time, and read the verdicts.

The questions of one query with eight samples:

* four lists of all samples, in balanced orders of presentation (see [`balanced`]), labelled by slot;
* four pairs without a common sample, each in both orders, labelled `A` and `B` as they stand;
* the first of these pairs once more in both orders, with the two labels exchanged;
* one rating of each sample.

A pair asks for `A` or `B`, as `pairs_soft` does. One answer to a pair or a rating gives two readings: the word, and
the probabilities behind it. So the two readings differ in nothing else.

For the first six queries, the judge also compares the first sample with itself, once with idle sentences at its end
and once cut in half, in both orders. Then it inserts each sample among the others, which stand as the lists ranked
them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rankbuffer_trl.data import DataError, QueryTable, normal_row, prompt_id, response_faults, text_faults
from rankbuffer_trl.decoding import excerpt
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import (
    Call,
    Judge,
    ProbabilityError,
    Question,
    Reading,
    Reply,
    insertion_question,
    lead,
    pairwise_question,
    pointwise_question,
)
from rankbuffer_trl.monitoring import sign
from rankbuffer_trl.rewards import RATING_MAX, balanced, pass_questions, shuffle

from ..batch.ask import AnswerLog, ask_many, hash_question
from ..data.lines import rows_of
from .rankings import Pair, QueryVerdicts

logger = logging.getLogger(__name__)

LISTS = 4
MIN_SAMPLES = 4
MAX_SAMPLES = 8
FURTHER = 6  # queries with insertions, and with a sample that is padded and cut
IDLE = "I hope that this helps. There is always more to say about such a question, and much depends on the case."


class Lenient(Question):
    """A soft question whose answer is the verdict alone if its probabilities cannot be read."""

    def read_reply(self, reply: Reply) -> Any:
        """See [`Question`]."""
        try:
            return super().read_reply(reply)
        except ProbabilityError:
            return self.read(reply.text, reply.cut_off)


def rows_in(key: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file that the setting `key` names, each after its place.

    Raises:
        [`DataError`]: if there is no such file, or a row is not a JSON object.
    """
    if not Path(path).is_file():
        raise DataError(f"{key}={path} is not a file")
    for place, row, fault in rows_of(path, "train"):
        if fault:
            raise DataError(f"{key}={path}, {place}: {fault}")
        yield f"{key}={path}, {place}", row


def read_rollouts(path: str, table: QueryTable) -> dict[str, RolloutGroup]:
    """Read the samples of each query as a group.

    Raises:
        [`DataError`]: for the first row that cannot be used, or if there are no rows.
    """
    groups: dict[str, RolloutGroup] = {}
    for place, row in rows_in("samples", path):
        row = normal_row(row)
        query_id, responses = row["query_id"], row.get("responses")
        # A loop that raises: the first fault is enough.
        for key, problem, value in chain(text_faults("query_id", query_id), response_faults(responses, 0)):
            raise DataError(f"{place}: {key} {problem}, got {excerpt(value)}")
        texts = list(dict.fromkeys(responses))[:MAX_SAMPLES]  # type: ignore[arg-type]  # checked above
        if len(texts) < MIN_SAMPLES:
            raise DataError(
                f"{place}: query {query_id!r} has {len(texts)} different responses, and the audit needs {MIN_SAMPLES}"
                f" to {MAX_SAMPLES}: sample more, or delete the row"
            )
        own = table[query_id].prompt if query_id in table else None
        if own is None or prompt_id(row["prompt"] or own) != prompt_id(own):  # the judge would see foreign rubrics
            raise DataError(
                f"{place}: query {query_id!r} is not in the data set, or has another prompt there: sample from the"
                " data set that dataset_name names"
            )
        if query_id in groups:
            raise DataError(f"{place}: query {query_id!r} has samples in a row before")
        groups[query_id] = RolloutGroup(table[query_id], tuple(Rollout(i, text) for i, text in enumerate(texts)), 0)
    if not groups:
        raise DataError(f"samples={path} has no rows")
    return groups


def pairs_of(group: RolloutGroup, seed: int) -> list[Pair]:
    """Draw as many pairs as there are without a common sample, and return each and then its reverse."""
    shuffled = shuffle(range(len(group.rollouts)), seed, group, "pairs")  # not a list's order: its slots are free
    return [pair for a, b in zip(shuffled[::2], shuffled[1::2], strict=False) for pair in ((a, b), (b, a))]


def questions(group: RolloutGroup, seed: int, soft: bool = False) -> dict[tuple, Question]:
    """Make the questions of every group, by a key such as `("list", (3, 0, 2, 1))`. `soft`: with probabilities."""
    ids = range(len(group.rollouts))
    orders = balanced(ids, LISTS, seed, group)
    pairs = pairs_of(group, seed)
    made: dict[tuple, Question] = {}
    made |= {("list", order): one for order, one in zip(orders, pass_questions(group, orders, "look"), strict=True)}
    made |= {("pair", pair): pair_question(group, pair) for pair in pairs}
    for first, second in pairs[:2]:  # the first pair, in both orders
        labelled = pair_question(group, (second, first))
        # B stands first, which alone separates label from place.
        blocks = {name: shown[::-1] for name, shown in labelled.responses.items()}
        made["crossed", (first, second)] = replace(labelled, responses=blocks)
    most = RATING_MAX if soft else 10  # to 9: 1 and 10 often share a token
    made |= {("score", i): pointwise_question(group.query, group.rollouts[i].text, most=most) for i in ids}
    return made | softened({key: one for key, one in made.items() if key[0] != "list"}) if soft else made


def length_questions(group: RolloutGroup, soft: bool = False) -> dict[tuple, Question]:
    """Make the questions whether the first sample is better than itself padded and cut, by the label of the sample."""
    text = group.rollouts[0].text
    # Never empty: half of one character is none.
    changed = {"padded": f"{text}\n\n{IDLE}", "cut": text[: len(text) // 2].rstrip() or "."}
    made = {(edit, "A"): pairwise_question(group.query, text, other, tie=False) for edit, other in changed.items()}
    made |= {(edit, "B"): pairwise_question(group.query, other, text, tie=False) for edit, other in changed.items()}
    return softened(made) if soft else made


def softened(hard: Mapping[tuple, Question]) -> dict[tuple, Question]:
    """Return the same questions with probabilities, where the server gives them."""
    return {key: Lenient(**vars(question) | {"soft": True}) for key, question in hard.items()}


def pair_question(group: RolloutGroup, pair: Pair) -> Question:
    """Ask which sample of a pair is better: the first one, which is `A`, or `B`."""
    first, second = (group.rollouts[i].text for i in pair)
    return pairwise_question(group.query, first, second, tie=False)


def insertions(group: RolloutGroup, order: Sequence[int]) -> dict[tuple, Question]:
    """Make the questions that take each sample out of an order, worst to best, and put it back, by its place."""
    texts = [group.rollouts[i].text for i in order]
    without = {place: texts[:place] + texts[place + 1 :] for place in range(len(texts))}
    return {("insert", place): insertion_question(group.query, without[place], texts[place]) for place in without}


def read_verdicts(query_id: str, answers: Mapping[tuple, Any]) -> QueryVerdicts:
    """Put the verdicts on the questions about one query together."""

    def of(kind: str) -> dict[Any, Any]:
        verdicts = {key: answer.value if isinstance(answer, Reading) else answer for key, answer in answers.items()}
        return {key[1]: verdict for key, verdict in verdicts.items() if key[0] == kind}

    def readings(kind: str) -> dict[Any, Reading]:
        return {key[1]: answer for key, answer in answers.items() if key[0] == kind and isinstance(answer, Reading)}

    scores, means = list(of("score").values()), [reading.mean for reading in readings("score").values()]
    return QueryVerdicts(
        query_id,
        [(shown, slots and tuple(shown[slot] for slot in slots)) for shown, slots in of("list").items()],
        {pair: label and pair["AB".index(label)] for pair, label in of("pair").items()},
        scores,
        means if len(means) == len(scores) else [],
        {pair: label and pair["BA".index(label)] for pair, label in of("crossed").items()},
        list(of("insert").items()),
        {pair: reading.log_odds("A", "B") for pair, reading in readings("pair").items()},
        {pair: reading.log_odds("B", "A") for pair, reading in readings("crossed").items()},
        *(losses(of(kind), readings(kind)) for kind in ("padded", "cut")),
    )


def losses(verdicts: Mapping[str, str | None], readings: Mapping[str, Reading]) -> float | None:
    """Return how often a sample, named by its labels, loses against a change of itself; `None` if a verdict failed."""
    if len(readings) == 2:  # both orders together cancel the position bias
        return (1 + sign(lead(readings["A"], readings["B"]))) / 2
    if len(verdicts) < 2 or None in verdicts.values():
        return None
    return sum(verdict != label for label, verdict in verdicts.items()) / 2


async def try_out(judge: Judge, name: str, question: Question, log: Path | None) -> None:
    """Ask a judge one question and close it, or raise [`JudgeError`]. The answer counts, and is not paid for twice."""
    try:
        verdict, call = await judge.first_question(question)
        with AnswerLog(log) as answers:
            answers.add(f"{name} {hash_question(judge, question)}", verdict, call)
    finally:
        await judge.client.close()


async def gives_probabilities(
    make_judge: Callable[[], Judge], group: RolloutGroup, log: Path | None, seed: int
) -> bool:
    """Tell by one question, whose answer counts, whether a judge's server gives probabilities. Say so if not.

    Raises:
        [`JudgeError`]: if the judge does not answer the same question without them either.
    """
    key = ("score", 0)
    name = f"{group.query.id} {key}"  # the name it has later, so that the answer counts
    answers = await ask_many(
        make_judge(), {name: questions(group, seed, soft=True)[key]}, log, "asking for probabilities"
    )
    # Malformed: that says nothing against probabilities.
    if isinstance(answers.values.get(name), Reading) or answers.asked[name].outcome == "malformed":
        return True
    if answers.failures:
        await try_out(make_judge(), name, questions(group, seed)[key], log)
    why = answers.failures.get(name, "its answers come without them")
    logger.warning("The judge gives no probabilities (%s). The audit reads its greedy verdicts alone.", why)
    return False


async def ask_everything(
    make_judge: Callable[[], Judge], groups: Sequence[RolloutGroup], log: Path | None, seed: int, soft: bool = True
) -> tuple[list[QueryVerdicts], list[Call]]:
    """Ask all questions about all groups. Return the verdicts by query, and what each question cost.

    Args:
        make_judge (`Callable[[], Judge]`):
            Makes a judge, which each call of [`ask_many`] closes.
        log (`Path`, *optional*):
            File of the answers. A question whose answer is there is not asked again.

    Raises:
        [`JudgeError`]: if the judge is not there, or the very first question fails.
    """
    if log is None or not log.exists():  # a log shows that this judge has answered before
        key, first = next(iter(questions(groups[0], seed).items()))
        await try_out(make_judge(), f"{groups[0].query.id} {key}", first, log)
    if soft:
        soft = await gives_probabilities(make_judge, groups[0], log, seed)
    by_query = {group.query.id: questions(group, seed, soft) for group in groups}
    for group in groups[:FURTHER]:
        by_query[group.query.id] |= length_questions(group, soft)
    named = {f"{query_id} {key}": one for query_id, each in by_query.items() for key, one in each.items()}
    answers = await ask_many(make_judge(), named, log, "asking the judge")
    verdicts = {id: {key: answers.values.get(f"{id} {key}") for key in each} for id, each in by_query.items()}

    inserted = {}
    for group in groups[:FURTHER]:
        if places := read_verdicts(group.query.id, verdicts[group.query.id]).places:
            inserted[group.query.id] = insertions(group, sorted(range(len(places)), key=lambda i: places[i]))
    named = {f"{query_id} {key}": one for query_id, each in inserted.items() for key, one in each.items()}
    # After the lists, whose mean order they are put into.
    put_back = await ask_many(make_judge(), named, log, "putting samples back")
    for id, each in inserted.items():
        verdicts[id] |= {key: put_back.values.get(f"{id} {key}") for key in each}
    return [read_verdicts(id, each) for id, each in verdicts.items()], [
        *answers.asked.values(),
        *put_back.asked.values(),
    ]
