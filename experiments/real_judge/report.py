"""Count how often a recorded judge is right about answers of known order, by its words and by its probabilities.

python -m experiments.real_judge.report experiments/real_judge/qwen2.5-coder-1.5b.jsonl.gz
"""

import argparse
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from experiments.real_judge.answers import BETTER
from experiments.real_judge.ask import ANCHORS, INSERTED
from rankbuffer_lab.rejudge.duel import share_of

LEAST = 1e-6  # of an alternative in log odds


@dataclass(frozen=True)
class Verdict:
    """One recorded verdict: the word, the probabilities of all words, and the tokens of the question."""

    word: Any
    chances: Mapping[str, float]
    outside: float
    shared: float
    tokens: int  # of the prompt and the answer
    new: int  # of these, not from the server's cache

    @classmethod
    def of(cls, found: list) -> "Verdict":
        """Read a verdict from the record."""
        value, (prompt, cached, completion) = found
        word, chances, outside, shared = value if value and isinstance(value[-1], float) else (value, {}, 0.0, 0.0)
        return cls(word, chances, outside, shared, prompt + completion, prompt - cached + completion)

    @property
    def mean(self) -> float:
        """The mean of numbers."""
        return sum(float(number) * chance for number, chance in self.chances.items())

    @property
    def lead(self) -> float:
        """The log odds of the first response of a pair."""
        first, second = (max(self.chances[name], LEAST) for name in "AB")
        return math.log(first) - math.log(second)


Verdicts = Mapping[str, Verdict]
Leads = dict[tuple[str, str], float]  # by (better, worse): above 0 is right, 0 is a tie


@dataclass(frozen=True)
class Reading:
    """One way to read verdicts as leads of the better answer over the worse one.

    Args:
        name (`str`):
            What is asked.
        reads (`str`):
            What is read: `word` or `probabilities`.
        leads (`Callable[[Verdicts], Leads]`):
            Returns the leads of one query.
        used (`Callable[[str], bool]`):
            Whether the reading uses a question, by its name.
    """

    name: str
    reads: str
    leads: Callable[[Verdicts], Leads]
    used: Callable[[str], bool]


def alone(kind: str, soft: bool) -> Callable[[Verdicts], Leads]:
    """Read questions that give each answer a number: ratings, and positions, which may count from the best anchor."""
    sign = -1 if kind == "best_first" else 1

    def leads(verdicts: Verdicts) -> Leads:
        numbers = {
            name.split()[1]: sign * (verdict.mean if soft else float(verdict.word))
            for name, verdict in verdicts.items()
            if name.split()[0] == kind
        }
        return {(a, b): numbers[a] - numbers[b] for a, b in BETTER if a in numbers and b in numbers}

    return leads


def matches(kind: str, soft: bool) -> Callable[[Verdicts], Leads]:
    """Read pairs in both orders."""

    def lead(verdict: Verdict) -> float:
        if kind == "duel":
            first, second = verdict.word
            return first - second
        return verdict.lead if soft else math.copysign(1, verdict.lead)

    def leads(verdicts: Verdicts) -> Leads:
        found = {tuple(name.split()[1:]): lead(v) for name, v in verdicts.items() if name.startswith(f"{kind} ")}
        return {(a, b): found[a, b] - found[b, a] for a, b in BETTER if {(a, b), (b, a)} <= found.keys()}

    return leads


def one_order(soft: bool) -> Callable[[Verdicts], Leads]:
    """Read pairs in one order of presentation. Each order is a comparison of its own, by the order that is shown."""

    def leads(verdicts: Verdicts) -> Leads:
        found = {}
        for better, worse in BETTER:
            for shown, sign in (((better, worse), 1), ((worse, better), -1)):
                lead = sign * verdicts[f"pair {' '.join(shown)}"].lead
                found[shown] = lead if soft else math.copysign(1, lead)
        return found

    return leads


def lists(*kinds: str) -> Callable[[Verdicts], Leads]:
    """Read orders, or scores in one prompt: the mean place of each answer."""

    def leads(verdicts: Verdicts) -> Leads:
        places: dict[str, list[float]] = {}
        for name, verdict in verdicts.items():
            kind, *shown = name.split()
            if kind in kinds:
                for slot, answer in enumerate(shown):
                    place = verdict.word[slot] if kind == "group" else verdict.word.index(slot)
                    places.setdefault(answer, []).append(place)
        numbers = {answer: fmean(each) for answer, each in places.items()}
        return {(a, b): numbers[a] - numbers[b] for a, b in BETTER if a in numbers and b in numbers}

    return leads


def anchor_at_a_time(verdicts: Verdicts) -> Leads:
    """Read insertions as the sum of the log odds against each anchor, in both orders."""
    found = {tuple(name.split()[1:]): v.lead for name, v in verdicts.items() if name.startswith("pair ")}
    numbers = {
        name: sum(found[name, anchor] - found[anchor, name] for anchor in ANCHORS)
        for name in INSERTED
        if all((name, anchor) in found for anchor in ANCHORS)
    }
    return {(a, b): numbers[a] - numbers[b] for a, b in BETTER if a in numbers and b in numbers}


def two_looks(verdicts: Verdicts) -> Leads:
    """Read insertions among anchors shown in both orders: the mean of both expected positions."""
    worst_first, best_first = alone("insert", True)(verdicts), alone("best_first", True)(verdicts)
    return {pair: worst_first[pair] + best_first[pair] for pair in worst_first if pair in best_first}


def kind_is(*kinds: str) -> Callable[[str], bool]:
    """Return whether a question is of one of these kinds."""
    return lambda name: name.split()[0] in kinds


def readings() -> Iterator[Reading]:
    """Yield every way to read the record."""
    both = {"word": False, "probabilities": True}
    ratings = {
        "score9": "rating 0 to 9",
        "score9_plain": "rating 0 to 9, one rubric",
        "score10": "rating 0 to 10",
        "insert": "insertion, the paper's prompt",
        "count": "insertion, 'how many are worse?'",
        "best_first": "insertion, best anchor first",
    }
    for kind, name in ratings.items():
        for reads, soft in both.items():
            yield Reading(name, reads, alone(kind, soft), kind_is(kind))
    yield Reading("insertion, two looks", "probabilities", two_looks, kind_is("insert", "best_first"))
    pairs = {f"pair {a} {b}" for a, b in [*BETTER, *(pair[::-1] for pair in BETTER)]}
    for reads, soft in both.items():
        yield Reading("pair, one order", reads, one_order(soft), lambda name: name in pairs)
    for reads, soft in both.items():
        yield Reading("pair, both orders", reads, matches("pair", soft), lambda name: name in pairs)
        yield Reading("pair, both orders, one rubric", reads, matches("pair_plain", soft), kind_is("pair_plain"))
    yield Reading("pair with each anchor, both orders", "probabilities", anchor_at_a_time, kind_is("pair"))
    yield Reading("two scores, both orders", "word", matches("duel", False), kind_is("duel"))
    yield Reading("list of five", "word", lists("list"), kind_is("list"))
    yield Reading(
        "list of five, both orders", "word", lists("list", "list_reversed"), kind_is("list", "list_reversed")
    )
    yield Reading("scores of five in one prompt", "word", lists("group"), kind_is("group"))


def count(record: Sequence[Verdicts], reading: Reading) -> dict:
    """Count right, tied and wrong leads of a reading, and its tokens.

    A tie counts as half right in the share, whose mean and interval are over queries: the comparisons of a query have
    answers in common.
    """
    found = {i: list(leads.values()) for i, verdicts in enumerate(record) if (leads := reading.leads(verdicts))}
    leads = [lead for each in found.values() for lead in each]
    used = [v for i in found for name, v in record[i].items() if reading.used(name)]
    right, tied = sum(lead > 0 for lead in leads), sum(lead == 0 for lead in leads)
    share = share_of([fmean((lead > 0) + (lead == 0) / 2 for lead in each) for each in found.values()])
    return {
        "asked": reading.name,
        "read": reading.reads,
        "comparisons": len(leads),
        "right": right,
        "tied": tied,
        "wrong": len(leads) - right - tied,
        "share": round(share.probability, 3),
        "low": round(share.low, 3),
        "high": round(share.high, 3),
        "questions": len(used),
        "tokens": sum(v.tokens for v in used),
        "new_tokens": sum(v.new for v in used),
    }


def by_damage(record: Sequence[Verdicts], reading: Reading) -> dict[str, str]:
    """Return how many comparisons of each kind of worse answer are right, and of how many."""
    found: dict[str, list[float]] = {}
    for verdicts in record:
        for (better, worse), lead in reading.leads(verdicts).items():
            if (better, worse) in BETTER:
                found.setdefault(worse, []).append((lead > 0) + (lead == 0) / 2)
    return {worse: f"{sum(each):g} of {len(each)}" for worse, each in found.items()}


def parameters(record: Sequence[Verdicts]) -> dict[str, float]:
    """Measure what a simulated judge needs: opinion and place in the log odds of pairs, and how ratings are spread."""
    opinions, places, means, widths, words = [], [], [], [], []
    for verdicts in record:
        for a, b in BETTER:
            there, back = verdicts[f"pair {a} {b}"].lead, verdicts[f"pair {b} {a}"].lead
            opinions.append((there - back) / 2)
            places.append((there + back) / 2)
        for name, verdict in verdicts.items():
            if name.startswith("score9 "):
                means.append(verdict.mean)
                words.append(verdict.word)
                widths.append(math.sqrt(sum((float(k) - verdict.mean) ** 2 * p for k, p in verdict.chances.items())))
    outside = [v.outside for verdicts in record for v in verdicts.values() if v.chances]
    return {
        "opinion_of_a_pair": fmean(opinions),
        "opinion_of_a_pair_deviation": stdev(opinions),
        "opinion_of_a_pair_median_size": median(map(abs, opinions)),
        "place": fmean(places),
        "place_deviation": stdev(places),
        "rating_mean": fmean(means),
        "rating_deviation": stdev(means),
        "rating_width": fmean(widths),
        "rating_8": sum(word == 8 for word in words) / len(words),
        "outside_most": max(outside),
    }


def read(path: Path) -> Sequence[Verdicts]:
    """Read a record."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [{name: Verdict.of(found) for name, found in row["verdicts"].items()} for row in rows]


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table."""
    rows = list(rows)
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join(lines + ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows])


def main() -> None:
    """Print the tables, and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    record = read(parser.parse_args().record)
    counts = [count(record, reading) for reading in readings() if any(reading.leads(v) for v in record)]
    print(table(counts))
    soft = [r for r in readings() if r.name in ("rating 0 to 9", "pair, both orders")]
    damages = [{"asked": r.name, "read": r.reads, **by_damage(record, r)} for r in soft]
    print(table(damages))
    print(json.dumps({"counts": counts, "parameters": parameters(record)}))


if __name__ == "__main__":
    main()
