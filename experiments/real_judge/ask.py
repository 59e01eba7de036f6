"""Ask a real judge about answers of known order, and record each verdict with its probabilities.

    python -m experiments.real_judge.ask --answers ANSWERS.jsonl --record RECORD.jsonl.gz \
        --judge_url http://127.0.0.1:8001/v1 --judge_model judge

After a kill, run the same command again: it asks only what has no answer yet.
"""

import argparse
import asyncio
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random

from experiments.real_judge.answers import BETTER, DAMAGED
from rankbuffer_tools.batch.ask import ask_many
from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import (
    Endpoint,
    Judge,
    Question,
    duel_question,
    group_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
)
from rankbuffer_trl.judge.config import Servers

ANSWERS = ("good", *DAMAGED)
LISTED = ("good", *DAMAGED[:-1])  # in the lists
ANCHORS = ("weak_shuffled", "weak", "good_2")  # from worst to best
INSERTED = ("good", "good_cut", "off_topic", "good_shuffled")
ANY = (Rubric("Answers the query well.", 5),)  # in place of the query's rubrics

BEST_FIRST = {  # the paper's prompt, turned round
    "ordered from WORST to BEST": "ordered from BEST to WORST",
    "candidate is worse than A0": "candidate is better than A0",
    "candidate is better than A{K-1}": "candidate is worse than A{K-1}",
    "(worst to best)": "(best to worst)",
}
COUNT = """\
You are a strict response-quality judge. How many of the {K} responses
below are worse than the candidate response? Use the query and weighted
rubrics.

QUERY
{QUERY}

RUBRICS
{WEIGHTED_RUBRICS}

RESPONSES
{ORDERED_ANCHOR_BLOCKS}

CANDIDATE
{CANDIDATE_RESPONSE}

Return JSON only: {"position": <integer from 0 through {K}>}"""


def questions(row: dict, number: int) -> Iterator[tuple[str, Question]]:
    """Yield all questions about a query by name. Costly kinds are asked about the first queries only.

    Args:
        row (`dict`):
            The query and its answers.
        number (`int`):
            The number of the query, from 0.
    """
    query = Query.from_row(row)
    plain = replace(query, rubrics=ANY)
    texts = row["answers"]
    for name in ANSWERS:
        yield f"score9 {name}", pointwise_question(query, texts[name], most=9)
    for first, second in both(BETTER):
        yield f"pair {first} {second}", pairwise_question(query, texts[first], texts[second], tie=False)
    if number < 20:
        for name in INSERTED:
            anchors = [texts[anchor] for anchor in ANCHORS]
            insertion = insertion_question(query, anchors, texts[name])
            yield f"insert {name}", insertion
            yield f"count {name}", replace(insertion, template=COUNT)
            turned = insertion_question(query, anchors[::-1], texts[name])
            yield f"best_first {name}", replace(turned, template=exchanged(turned.template, BEST_FIRST))
    if number < 24:
        shown = Random(row["query_id"]).sample(LISTED, len(LISTED))
        for kind, names in (("list", shown), ("list_reversed", shown[::-1])):
            candidates = [Rollout(i, texts[name]) for i, name in enumerate(names)]
            yield " ".join([kind, *names]), ranking_question(query, candidates)
        yield " ".join(["group", *shown]), group_question(query, [texts[name] for name in shown])
    if number < 30:
        for name in ANSWERS:
            yield f"score9_plain {name}", pointwise_question(plain, texts[name], most=9)
    if number < 12:
        for name in ANSWERS:
            yield f"score10 {name}", pointwise_question(query, texts[name])
        for first, second in both(BETTER):
            yield f"pair_plain {first} {second}", pairwise_question(plain, texts[first], texts[second], tie=False)
            yield f"duel {first} {second}", duel_question(query, texts[first], texts[second])
        known = set(both(BETTER))
        for first, second in both((name, anchor) for name in INSERTED for anchor in ANCHORS):
            if (first, second) not in known:
                yield f"pair {first} {second}", pairwise_question(query, texts[first], texts[second], tie=False)


def both(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs in both orders. Neighbours share the first answer, and so the start of a prompt."""
    return sorted(set(chain.from_iterable(((a, b), (b, a)) for a, b in pairs)))


def exchanged(text: str, words: dict[str, str]) -> str:
    """Replace words, each of which must be there."""
    for old, new in words.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def asked(rows: list[dict]) -> dict[str, Question]:
    """Return all questions by query and name. Each that can have probabilities asks for them."""
    found = {}
    for number, row in enumerate(rows):
        for name, question in questions(row, number):
            with suppress(ValueError):  # a list has no probabilities
                question = replace(question, soft=True)
            found[f"{row['query_id']} {name}"] = question
    return found


def main() -> None:
    """Ask, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--answers", "--record"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--judge_url", "--judge_model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--queries", type=int, help="the first queries only")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.answers.read_text().splitlines()][: arguments.queries]
    endpoint = Endpoint((arguments.judge_url,), arguments.judge_model, concurrency=1, timeout=600)
    judge = Judge(Servers.of(endpoint, "json_schema"), guard=False)
    log = arguments.record.with_name(arguments.record.name + ".answers.jsonl")
    answers = asyncio.run(ask_many(judge, asked(rows), log, "asking"))
    for row in rows:
        start = f"{row['query_id']} "
        row["verdicts"] = {
            name.removeprefix(start): [answers.values[name], list(answers.asked[name].usage)]
            for name in answers.values
            if name.startswith(start)
        }
    with gzip.GzipFile(arguments.record, "wb", mtime=0) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    print(json.dumps({"asked": len(answers.values), "failed": len(answers.failures), **answers.totals.as_dict()}))


if __name__ == "__main__":
    main()
