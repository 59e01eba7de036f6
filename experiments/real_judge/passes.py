"""Ask a real judge which answer of a group is the best, which the worst, for all scores, and for each rubric alone.

    python -m experiments.real_judge.passes --judge_url http://127.0.0.1:8001/v1 --judge_model judge \
        --log LOG.jsonl --record RECORD.jsonl.gz

All questions of one pass share their prompt up to the last sentence, so a server computes the group once. After a
kill, run the same command again: it asks only what has no answer yet. `passes_report.py` reads what `--record` writes.
"""

import argparse
import asyncio
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from experiments.real_judge.ask import ANSWERS, LISTED
from rankbuffer_tools.batch.ask import ask_many
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import (
    Endpoint,
    Judge,
    Question,
    Reply,
    Verdict,
    group_question,
    pointwise_question,
    read_tokens,
    score_verdict,
    scores_verdict,
)
from rankbuffer_trl.judge.config import Servers

HERE = Path(__file__).parent
RECORD = HERE / "passes.jsonl.gz"
DIGITS = [str(digit) for digit in range(10)]
GROUP_PROMPT = """\
You are a strict response-quality judge. Compare the {N} responses below
using the query and weighted rubrics. The order in which they stand
means nothing.

QUERY
{QUERY}

RUBRICS
{WEIGHTED_RUBRICS}

RESPONSES
{RESPONSE_BLOCKS}

"""
ENDS = {
    "best": 'Which response is the best? Return JSON only, with its number:\n{"best": <integer from 0 through {N-1}>}',
    "worst": "Which response is the worst? Return JSON only, with its number:\n"
    '{"worst": <integer from 0 through {N-1}>}',
    "scores": "Score each response from 0 (worst) to 9 (best), in comparison with the others.\n"
    "Return JSON only, with the scores in the order of the responses:\n"
    '{"scores": [<{N} integers from 0 through 9>]}',
}


@dataclass(frozen=True)
class Scores(Question):
    """A question for a score of one digit for each response, read with the probabilities of each digit."""

    def fields(self, decoding: str, free_tokens: int) -> dict:
        """See [`Question`]."""
        return super().fields(decoding, free_tokens) | {"logprobs": True, "top_logprobs": 20}

    def read_reply(self, reply: Reply) -> list:
        """Return the scores, and the log probabilities of the tokens that hold them, digit by digit."""
        said, places = "", []
        for token, listed in read_tokens(reply.logprobs):
            if '"scores":' in said and token.strip() in DIGITS:
                places.append({name.strip(): logprob for name, logprob in listed[::-1] if name.strip() in DIGITS})
            said += token
        return [self.read(reply.text, reply.cut_off), places]


def question(query: Query, responses: list[str], kind: str) -> Question:
    """Ask about a whole group: for the best of it, the worst of it, or all scores."""
    n = len(responses)
    asked = group_question(query, responses)
    asked = replace(asked, template=GROUP_PROMPT + ENDS[kind], texts=asked.texts | {"{N-1}": str(n - 1)})
    if kind == "scores":
        return Scores(**{**vars(asked), "verdict": scores_verdict(n, 9)})
    slots = score_verdict(n - 1)
    regex = {"regex": slots.constraint["regex"].replace("score", kind)}
    verdict = Verdict({kind: n - 1}, regex, {kind: slots.properties["score"]}, slots.check)
    return replace(asked, verdict=verdict, soft=True)


def groups_of_five() -> list[dict]:
    """Return the queries with answers of known order. The first 24 have lists in the record."""
    with gzip.open(HERE / "qwen2.5-coder-1.5b.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def groups_of_eight() -> list[dict]:
    """Return the queries that the audit asked about, with eight samples of one policy each, by number."""
    lines = (HERE.parents[1] / "recipes/small/everyday.jsonl").read_text().splitlines()
    queries = {row["query_id"]: row for row in map(json.loads, lines)}
    with gzip.open(HERE / "audit_answers.jsonl.gz", "rt") as lines:
        audited = {json.loads(line)["call"]["query_id"] for line in lines}
    rows = [json.loads(line) for line in (HERE / "audit_samples.jsonl").read_text().splitlines()]
    return [
        {
            "query_id": row["query_id"],
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "rubrics": queries[row["query_id"]]["rubrics"],
            "answers": {str(i): text for i, text in enumerate(row["responses"])},
        }
        for row in rows
        if row["query_id"] in audited
    ]


def opposed_passes(
    row: dict, names: Sequence[str], kinds: Sequence[str] = ("best", "worst")
) -> Iterator[tuple[str, Question]]:
    """Yield the questions of two opposed passes over some answers to a query, by name."""
    query, shown = Query.from_row(row), Random(row["query_id"]).sample(names, len(names))
    for order in (shown, shown[::-1]):
        for kind in kinds:
            responses = [row["answers"][name] for name in order]
            yield " ".join([row["query_id"], kind, *order]), question(query, responses, kind)


def rubric_by_rubric(row: dict) -> Iterator[tuple[str, Question]]:
    """Yield a rating of each answer by each rubric alone, by name. Neighbours share the start of a prompt."""
    query = Query.from_row(row)
    for number, rubric in enumerate(query.rubrics):
        alone = replace(query, rubrics=(rubric,))
        for name in ANSWERS:
            rating = pointwise_question(alone, row["answers"][name], "rubric", most=9)
            yield f"{row['query_id']} rubric{number} {name}", replace(rating, soft=True)


def asked() -> dict[str, Question]:
    """Return all questions by name, the most telling first."""
    fives, eights = groups_of_five(), groups_of_eight()
    found: dict[str, Question] = {}
    for row in eights[:9]:
        found |= opposed_passes(row, list(row["answers"]), list(ENDS))
    for row in fives[24:36]:
        found |= opposed_passes(row, LISTED)
    for row in fives[24:30]:
        found |= opposed_passes(row, LISTED[1:])  # the best is taken out
    shuffled = Random(0).sample(fives, len(fives))
    for row in shuffled[:13]:
        found |= rubric_by_rubric(row)
    for row in fives[36:48]:
        found |= opposed_passes(row, LISTED)
    for row in eights[9:18]:
        found |= opposed_passes(row, list(row["answers"]))
    for row in shuffled[13:]:
        found |= rubric_by_rubric(row)
    for row in fives[48:]:
        found |= opposed_passes(row, LISTED)
    for row in eights[18:]:
        found |= opposed_passes(row, list(row["answers"]))
    for row in fives[30:]:
        found |= opposed_passes(row, LISTED[1:])
    return found


def pack(log: Path, record: Path) -> None:
    """Write what the report reads of a log: names, readings and tokens, compressed."""

    def short(chances: Mapping[str, float]) -> dict[str, float]:
        return {each: float(f"{number:.5g}") for each, number in chances.items()}

    packed = []
    for row in map(json.loads, log.read_text().splitlines()):
        value = row["value"]
        if isinstance(value, dict):
            value = {**value, "chances": short(value["chances"])}
        else:
            value = [value[0], [short(place) for place in value[1]]]
        packed.append(json.dumps({"key": row["key"], "value": value, "call": {"usage": row["call"]["usage"]}}) + "\n")
    with gzip.GzipFile(record, "wb", mtime=0) as file:
        file.write("".join(packed).encode())


def main() -> None:
    """Ask, and say what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--judge_url", "--judge_model"):
        parser.add_argument(name, required=True)
    for name in ("--log", "--record"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    endpoint = Endpoint((arguments.judge_url,), arguments.judge_model, concurrency=1, timeout=600)
    judge = Judge(Servers.of(endpoint, "json_schema"), guard=False)
    answers = asyncio.run(ask_many(judge, asked(), arguments.log, "asking"))
    pack(arguments.log, arguments.record)
    print(json.dumps({"asked": len(answers.values), "failed": len(answers.failures), **answers.totals.as_dict()}))


if __name__ == "__main__":
    main()
