"""Count how often a recorded judge is right about answers of known order, by its words and by its probabilities.

python -m experiments.real_judge.report experiments/real_judge/qwen2.5-coder-1.5b.jsonl.gz
"""

import argparse
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

from experiments.real_judge.answers import BETTER
from experiments.real_judge.ask import ANCHORS, INSERTED
from rankbuffer_tools.compare.duel import share_of
from rankbuffer_trl.judge import Reading


@dataclass(frozen=True)
class Verdict:
    """One recorded verdict, and the tokens of its question.

    Args:
        reading (`Reading`):
            The word and the probabilities of all words. A verdict of lists has no probabilities.
        tokens (`int`):
            Tokens of the prompt and the answer.
        new (`int`):
            Of these, the ones that did not come from the server's cache.
    """

    reading: Reading
    tokens: int
    new: int

    @classmethod
    def of(cls, found: list) -> "Verdict":
        """Read a verdict from the record."""
        value, (prompt, cached, completion) = found
        word, chances, *rest = value if value and isinstance(value[-1], float) else (value, {}, 0.0, 0.0)
        chances = {int(each) if each.isdigit() else each: chance for each, chance in chances.items()}
        return cls(Reading(word, chances, *rest), prompt + completion, prompt - cached + completion)

    @property
    def lead(self) -> float:
        """The log odds of the first response of a pair."""
        return self.reading.log_odds("A", "B")


Verdicts = Mapping[str, Verdict]
Leads = dict[tuple[str, str], float]  # by (better, worse): above 0 is right, 0 is a tie


@dataclass(frozen=True)
class Way:
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
            name.split()[1]: sign * (verdict.reading.mean if soft else float(verdict.reading.value))
            for name, verdict in verdicts.items()
            if name.split()[0] == kind
        }
        return {(a, b): numbers[a] - numbers[b] for a, b in BETTER if a in numbers and b in numbers}

    return leads


def matches(kind: str, soft: bool) -> Callable[[Verdicts], Leads]:
    """Read pairs in both orders."""

    def lead(verdict: Verdict) -> float:
        if kind == "duel":
            first, second = verdict.reading.value
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


def without_place(record: Sequence[Verdicts]) -> list[Verdicts]:
    """Return a record whose pairs have lost the mean log odds of the pairs of the other queries."""
    known = set(BETTER) | {pair[::-1] for pair in BETTER}
    names = [f"pair {a} {b}" for a, b in known]
    means = [fmean(verdicts[name].lead for name in names) for verdicts in record]
    found = []
    for verdicts, own in zip(record, means, strict=True):
        place = (sum(means) - own) / (len(means) - 1)
        chances = {name: 1 / (1 + math.exp(place - verdicts[name].lead)) for name in names}
        shifted = {
            name: replace(verdicts[name], reading=verdicts[name].reading._replace(chances={"A": a, "B": 1 - a}))
            for name, a in chances.items()
        }
        found.append({**verdicts, **shifted})
    return found


def lists(*kinds: str) -> Callable[[Verdicts], Leads]:
    """Read orders, or scores in one prompt: the mean place of each answer."""

    def leads(verdicts: Verdicts) -> Leads:
        places: dict[str, list[float]] = {}
        for name, verdict in verdicts.items():
            kind, *shown = name.split()
            if kind in kinds:
                for slot, answer in enumerate(shown):
                    said = verdict.reading.value
                    place = said[slot] if kind == "group" else said.index(slot)
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


def two_passes(verdicts: Verdicts) -> Leads:
    """Read insertions among anchors shown in both orders: the mean of both expected positions."""
    worst_first, best_first = alone("insert", True)(verdicts), alone("best_first", True)(verdicts)
    return {pair: worst_first[pair] + best_first[pair] for pair in worst_first if pair in best_first}


def kind_is(*kinds: str) -> Callable[[str], bool]:
    """Return whether a question is of one of these kinds."""
    return lambda name: name.split()[0] in kinds


def readings() -> Iterator[Way]:
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
            yield Way(name, reads, alone(kind, soft), kind_is(kind))
    yield Way("insertion, two passes", "probabilities", two_passes, kind_is("insert", "best_first"))
    pairs = {f"pair {a} {b}" for a, b in [*BETTER, *(pair[::-1] for pair in BETTER)]}
    for reads, soft in both.items():
        yield Way("pair, one order", reads, one_order(soft), lambda name: name in pairs)
    for reads, soft in both.items():
        yield Way("pair, both orders", reads, matches("pair", soft), lambda name: name in pairs)
        yield Way("pair, both orders, one rubric", reads, matches("pair_plain", soft), kind_is("pair_plain"))
    yield Way("pair with each anchor, both orders", "probabilities", anchor_at_a_time, kind_is("pair"))
    yield Way("two scores, both orders", "word", matches("duel", False), kind_is("duel"))
    yield Way("list of five", "word", lists("list"), kind_is("list"))
    yield Way("list of five, both orders", "word", lists("list", "list_reversed"), kind_is("list", "list_reversed"))
    yield Way("scores of five in one prompt", "word", lists("group"), kind_is("group"))


def count(record: Sequence[Verdicts], way: Way) -> dict:
    """Count right, tied and wrong leads of a way to read, and its tokens.

    A tie counts as half right in the share, whose mean and interval are over queries: the comparisons of a query have
    answers in common.
    """
    found = {i: list(leads.values()) for i, verdicts in enumerate(record) if (leads := way.leads(verdicts))}
    leads = [lead for each in found.values() for lead in each]
    used = [v for i in found for name, v in record[i].items() if way.used(name)]
    right, tied = sum(lead > 0 for lead in leads), sum(lead == 0 for lead in leads)
    share = share_of([fmean((lead > 0) + (lead == 0) / 2 for lead in each) for each in found.values()])
    return {
        "asked": way.name,
        "read": way.reads,
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


def by_damage(record: Sequence[Verdicts], way: Way) -> dict[str, str]:
    """Return how many comparisons of each kind of worse answer are right, and of how many."""
    found: dict[str, list[float]] = {}
    for verdicts in record:
        for (better, worse), lead in way.leads(verdicts).items():
            if (better, worse) in BETTER:
                found.setdefault(worse, []).append((lead > 0) + (lead == 0) / 2)
    return {worse: f"{sum(each):g} of {len(each)}" for worse, each in found.items()}


def opinions(record: Sequence[Verdicts]) -> list[tuple[float, float]]:
    """Return by how much the better answer of each pair leads in log odds, and what the first place adds to that."""
    both = [(verdicts[f"pair {a} {b}"].lead, verdicts[f"pair {b} {a}"].lead) for verdicts in record for a, b in BETTER]
    return [((there - back) / 2, (there + back) / 2) for there, back in both]


def parameters(record: Sequence[Verdicts]) -> dict[str, float]:
    """Measure how large opinion and place are in the log odds of pairs, and how often the judge says 8."""
    leads, places = zip(*opinions(record), strict=True)
    words = [v.reading.value for verdicts in record for name, v in verdicts.items() if name.startswith("score9 ")]
    outside = [v.reading.outside for verdicts in record for v in verdicts.values() if v.reading.chances]
    return {
        "opinion_of_a_pair": fmean(leads),
        "opinion_of_a_pair_deviation": stdev(leads),
        "opinion_of_a_pair_median_size": median(map(abs, leads)),
        "place": fmean(places),
        "place_deviation": stdev(places),
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
    once = next(each for each in readings() if each.name == "pair, one order" and each.reads == "probabilities")
    counts.append(count(without_place(record), replace(once, name="pair, one order, place taken out")))
    print(table(counts))
    soft = [r for r in readings() if r.name in ("rating 0 to 9", "pair, both orders")]
    damages = [{"asked": r.name, "read": r.reads, **by_damage(record, r)} for r in soft]
    print(table(damages))
    print(json.dumps({"counts": counts, "parameters": parameters(record)}))


if __name__ == "__main__":
    main()
