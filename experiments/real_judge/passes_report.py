"""Count what passes over a whole group tell: about answers of known order, and about samples of one policy.

python -m experiments.real_judge.passes_report experiments/real_judge/passes.jsonl.gz
"""

import argparse
import gzip
import json
import math
from ast import literal_eval
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from experiments.real_judge.answers import BETTER
from experiments.real_judge.ask import ANSWERS
from experiments.real_judge.passes import DIGITS, HERE, groups_of_five
from experiments.real_judge.report import read, table
from rankbuffer_tools.compare.duel import share_of
from rankbuffer_trl.judge import LEAST_CHANCE
from rankbuffer_trl.rewards import normalise

READINGS = {
    "best": {"best": 1},
    "worst": {"worst": -1},
    "best less worst": {"best": 1, "worst": -1},
    "all scores": {"scores": 1},
}
Numbers = Mapping[str, float]  # of the answers to one query, by name


class Pass(NamedTuple):
    """What a pass over a group says of each slot, by kind of question, less its mean; and the tokens of each kind."""

    shown: tuple[str, ...]
    slots: dict[str, list[float]]
    tokens: dict[str, list[int]]  # all, and those not from the cache


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a compressed file of lines of JSON."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def read_passes(lines: Iterable[dict[str, Any]]) -> dict[int, dict[str, list[Pass]]]:
    """Return the passes over each query, by the size of its group."""
    found: dict[int, dict[str, dict[tuple[str, ...], Pass]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        query, kind, *shown = line["key"].split(" ")[:-1]
        if not kind.startswith("rubric"):
            one_pass = found[len(shown)][query].setdefault(tuple(shown), Pass(tuple(shown), {}, {}))
            numbers = slots_of(line["value"])
            one_pass.slots[kind] = [number - fmean(numbers) for number in numbers]
            prompt, cached, said = line["call"]["usage"]
            one_pass.tokens[kind] = [prompt + said, prompt + said - cached]
    return {n: {query: list(passes.values()) for query, passes in each.items()} for n, each in found.items()}


def slots_of(value: Any) -> list[float]:
    """Return what one pass says of each slot: the log probability of its number, or its mean score."""
    if isinstance(value, dict):
        return [math.log(max(chance, LEAST_CHANCE)) for chance in value["chances"].values()]
    means = []
    for place in value[1]:
        chances = {int(digit): math.exp(logprob) for digit, logprob in place.items() if digit in DIGITS}
        means.append(sum(digit * chance for digit, chance in chances.items()) / sum(chances.values()))
    return means


def opinions(
    passes: Mapping[str, Sequence[Pass]], weights: Mapping[str, float], chosen: slice, out: bool
) -> dict[str, Numbers]:
    """Return what the chosen passes say of each answer, by query.

    Args:
        passes (`Mapping[str, Sequence[Pass]]`):
            Two passes over each query.
        weights (`Mapping[str, float]`):
            The kinds of questions that are read, and what each counts.
        chosen (`slice`):
            The passes that are read.
        out (`bool`):
            Take out the mean of each slot over the other queries.
    """
    asked = {
        query: both
        for query, both in passes.items()
        if len(both) == 2 and all(weights.keys() <= one_pass.slots.keys() for one_pass in both)
    }
    found: dict[str, Numbers] = {}
    if len(asked) < 2:
        return found
    for query, both in asked.items():
        sums: Counter[str] = Counter()
        others = [one_pass for other, each in asked.items() if other != query for one_pass in each]
        for kind, weight in weights.items():
            n = len(both[0].shown)
            mean = [fmean(one_pass.slots[kind][slot] for one_pass in others) if out else 0.0 for slot in range(n)]
            for one_pass in both[chosen]:
                for slot, name in enumerate(one_pass.shown):
                    sums[name] += weight * (one_pass.slots[kind][slot] - mean[slot])
        found[query] = dict(sums)
    return found


def agree(ours: Mapping[str, Numbers], theirs: Mapping[str, Mapping[tuple[str, str], float]]) -> str:
    """Return the share of pairs on which both agree, and its interval at 95 % over queries."""
    each = {
        query: [(numbers[a] > numbers[b]) == (lead > 0) for (a, b), lead in theirs[query].items()]
        for query, numbers in ours.items()
        if query in theirs
    }
    if not each:
        return ""
    share = share_of([fmean(right) for right in each.values()])
    return f"{share.probability:.2f} ({share.low:.2f} to {share.high:.2f}), {sum(map(len, each.values()))}"


def leads(numbers: Numbers, names: Iterable[str]) -> dict[tuple[str, str], float]:
    """Return the difference of each pair of names."""
    return {(a, b): numbers[a] - numbers[b] for a, b in combinations(names, 2)}


class Kept(NamedTuple):
    """What the kept records say, by query: soft ratings of all answers, and soft pairs of some samples."""

    known: dict[str, Numbers]
    samples: dict[str, Numbers]
    pairs: dict[str, dict[tuple[str, str], float]]


def read_kept() -> Kept:
    """Read the soft ratings and pairs of both kept records."""
    path = HERE / "qwen2.5-coder-1.5b.jsonl.gz"
    ids = [row["query_id"] for row in read_lines(path)]
    known = {
        query: {name: verdicts[f"score9 {name}"].reading.mean for name in ANSWERS}
        for query, verdicts in zip(ids, read(path), strict=True)
    }
    samples: dict[str, dict[str, float]] = defaultdict(dict)
    orders: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for line in read_lines(HERE / "audit_answers.jsonl.gz"):
        query, asked = line["key"].rsplit(" ", 1)[0].split(" ", 1)
        kind, which = literal_eval(asked)
        if kind == "score":
            samples[query][str(which)] = sum(int(s) * chance for s, chance in line["value"]["chances"].items())
        elif kind == "pair":
            a, b = map(str, which)
            orders[query][a, b] = slots_of(line["value"])[0] - slots_of(line["value"])[1]
    pairs = {query: {(a, b): each[a, b] - each[b, a] for a, b in each if a < b} for query, each in orders.items()}
    return Kept(known, samples, pairs)


def compare(passes: Mapping[int, Mapping[str, Sequence[Pass]]], kept: Kept) -> list[dict[str, str]]:
    """Return a row for each way to read the passes: how often it is right, and with what it agrees."""
    damaged = ANSWERS[1:-1]
    good = {query: {("good", worse): 1.0 for worse in damaged} for query in kept.known}
    others = {query: leads(numbers, damaged) for query, numbers in kept.known.items()}
    samples = {query: leads(numbers, numbers) for query, numbers in kept.samples.items()}
    audited = {query: {pair: samples[query][pair] for pair in asked} for query, asked in kept.pairs.items()}
    rows = []
    for name, weights in READINGS.items():
        for count, chosen in (("one", slice(0, 1)), ("two", slice(0, 2))):
            for out in (False, True):
                said = {n: opinions(each, weights, chosen, out) for n, each in passes.items()}
                how = {"read": name, "passes": count, "slot means": "out" if out else ""}
                rows.append(
                    how
                    | {
                        "good and four": agree(said.get(5, {}), good),
                        "the four others": agree(said.get(5, {}), others),
                        "others, good taken out": agree(said.get(4, {}), others),
                        "samples": agree(said.get(8, {}), samples),
                        "audited, ratings": agree(said.get(8, {}), audited),
                        "audited, pairs": agree(said.get(8, {}), kept.pairs),
                    }
                )
    asked = passes.get(5, {}).keys() & kept.known.keys(), passes.get(8, {}).keys() & kept.samples.keys()
    known, rated = ({q: each[q] for q in names} for each, names in zip((kept.known, kept.samples), asked, strict=True))
    ratings = {"good and four": agree(known, good), "audited, pairs": agree(rated, kept.pairs)}
    return [*rows, dict.fromkeys(rows[0], "") | {"read": "soft ratings"} | ratings]


def costs(passes: Mapping[int, Mapping[str, Sequence[Pass]]]) -> list[dict[str, Any]]:
    """Return the mean tokens of the questions of one pass, and of those the ones that the server computed."""
    found: dict[tuple[int, str], list[list[int]]] = defaultdict(list)
    for n, each in passes.items():
        for one_pass in (one_pass for both in each.values() for one_pass in both):
            for kind, used in one_pass.tokens.items():
                found[n, kind].append(used)
    rows = []
    for (n, kind), used in sorted(found.items()):
        tokens, computed = (round(fmean(each)) for each in zip(*used, strict=True))
        rows.append({"answers": n, "asked": kind, "questions": len(used), "tokens": tokens, "computed": computed})
    return rows


def by_rubric(lines: Iterable[dict[str, Any]], kept: Kept) -> list[dict[str, Any]]:
    """Return how often ratings by each rubric alone are right, beside the one rating by all, on the same queries."""
    weights = {row["query_id"]: [r["weight"] for r in row["rubrics"]] for row in groups_of_five()}
    read: dict[str, dict[tuple[int, str], tuple[float, float]]] = defaultdict(dict)
    for line in lines:
        query, kind, *names = line["key"].split(" ")[:-1]
        if kind.startswith("rubric"):
            chances = line["value"]["chances"]
            mean = sum(int(score) * chance for score, chance in chances.items())
            read[query][int(kind.removeprefix("rubric")), names[0]] = mean, float(line["value"]["value"])
    whole = {query: each for query, each in read.items() if len(each) == len(weights[query]) * len(ANSWERS)}
    rows = []
    for name, soft, scaled in (
        ("words", 1, True),
        ("probabilities", 0, True),
        ("probabilities, not normalised", 0, False),
    ):
        said, gains = {}, []
        for query, each in whole.items():
            columns = [[each[k, answer][soft] for answer in ANSWERS] for k in range(len(weights[query]))]
            columns = [normalise(column) for column in columns] if scaled else columns
            sums = [sum(w * x for w, x in zip(weights[query], row, strict=True)) for row in zip(*columns, strict=True)]
            said[query] = dict(zip(ANSWERS, sums, strict=True))
            gains.append(share_right(said[query]) - share_right(kept.known[query]))
        error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        right = fmean(share_right(numbers) for numbers in said.values()) if said else math.nan
        gain = f"{fmean(gains or [0]):+.3f} ± {1.96 * error:.3f}"
        rows.append({"read": name, "queries": len(said), "right": round(right, 3), "less the one rating": gain})
    return rows


def share_right(numbers: Numbers) -> float:
    """Return the share of pairs of known order whose better answer is above the other. A tie counts half."""
    return fmean((numbers[a] > numbers[b]) + (numbers[a] == numbers[b]) / 2 for a, b in BETTER)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    lines = read_lines(parser.parse_args().record)
    passes, kept = read_passes(lines), read_kept()
    print(table(compare(passes, kept)), table(costs(passes)), table(by_rubric(lines, kept)), sep="\n\n")


if __name__ == "__main__":
    main()
