"""Does a reference judge debias the rewards of an untrained policy? A run with a learning rate of 0.

    python -m experiments.toy_policy.untrained --methods grpo rankbuffer listwise_two --weakness phrase --strength 3

Six epochs of rollouts of the policy before training are scored by each method, as in training: by the judge with its
weakness, by this judge with a reference judge of one of 20 groups (`rankbuffer_trl/_debiasing.py`), and by the
reference judge alone. The program prints the cosine of the rewards with the true qualities from the second epoch on,
the step from which the largest effect is that of the judge's bias, and one JSON line. The rollouts are kept in
a file beside the policy.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Column, Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.toy_policy.judge import NOISE, TRAITS, NoisyRubricJudge, ReferenceRubricJudge, Weakness
from experiments.toy_policy.run import (
    G,
    Run,
    Settings,
    cosine,
    quieten,
    read_queries,
    recipe_arguments,
    rubrics_of,
    sample,
)
from experiments.toy_policy.second import EVERY
from rankbuffer_trl.data import QueryTable
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge, rubric_score
from rankbuffer_trl.rewards import load_method
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training import WORD_IS, Debiasing, GroupScorer

EPOCHS, QUERIES = 6, 6  # of a run, and of a step
PAYS_FOR = {"phrase": {f"{WORD_IS}then"}, "length": {"words"}, "echo": {"rubric_words", "words"}}


class Spread(Debiasing):
    """A reference judge of one of 20 groups of the whole run, since an untrained policy always differs alike."""

    def chosen(self, before: int, groups: int) -> Sequence[int]:
        """Return which groups of a step the reference judge scores."""
        return [i for i in range(groups) if (before + i) % EVERY == 0]


def rollouts(settings: Settings) -> list[list[str]]:
    """Sample the rollouts of all epochs by query, or read them from their file."""
    path = Path(settings.policy) / "rollouts.json"
    if not path.is_file():
        model = AutoModelForCausalLM.from_pretrained(settings.policy)
        tokenizer = AutoTokenizer.from_pretrained(settings.policy)
        path.write_text(json.dumps(sample(model, tokenizer, read_queries(settings), settings, seed=0)))
    return json.loads(path.read_text())


def steps_of(table: QueryTable, texts: Sequence[Sequence[str]], order: int) -> list[list[RolloutGroup]]:
    """Cut the rollouts into the steps of a run. An order of the queries decides who is read."""
    found, own = [], dict(zip(table.ids, texts, strict=True))
    for epoch in range(EPOCHS):
        for id in Random(f"{order} {epoch}").sample(table.ids, len(own)):
            shown = tuple(map(Rollout, range(G), own[id][epoch * G :]))
            found.append(RolloutGroup(table[id], shown, len(found) // QUERIES, epoch))
    return [found[start : start + QUERIES] for start in range(0, len(found), QUERIES)]


def study(name: str, settings: Settings, orders: int, weakness: str, strength: float) -> dict:
    """Return the row of a method: three cosines, and from when the judge's bias is named, by order."""
    queries = read_queries(settings)
    rubrics, texts = rubrics_of(queries), rollouts(settings)
    worth = [[rubric_score(text, of) for text in own] for own, of in zip(texts, rubrics.values(), strict=True)]
    mean, deviation = fmean(map(fmean, worth)), fmean(stdev(own) ** 2 for own in worth) ** 0.5
    trait = TRAITS.get(weakness, lambda *_: 0.0)
    liked = [trait(text, of) for own, of in zip(texts, rubrics.values(), strict=True) for text in own]
    args = recipe_arguments(Run(name, 0, settings, mean, deviation, "unused"))
    method = load_method(args.method, args.method_args or {}, args.seed)
    table = QueryTable(queries, method.responses_needed)
    likes = Weakness.of(weakness, strength, (fmean(liked), stdev(liked)))
    cheap = Judge(NoisyRubricJudge(mean, deviation, NOISE, weakness=likes), guard=args.judge_guard)
    reference_judge = Judge(ReferenceRubricJudge(mean, deviation), guard=args.judge_guard, method="reader")

    def play(judge: Judge, debiasing: Debiasing | None = None, order: int = 0) -> tuple[float, int | None]:
        cosines, named, steps = [], None, steps_of(table, texts, order)
        with tempfile.TemporaryDirectory() as folder:
            scorer = GroupScorer(method, judge, BufferStore(Path(folder) / "live.sqlite"), debiasing=debiasing)
            for number, groups in enumerate(steps):
                for group, found in zip(groups, scorer.score(groups, number).scores, strict=True):
                    true = [rubric_score(rollout.text, rubrics[group.query.id]) for rollout in group.rollouts]
                    if group.known_epoch and len(set(true)) > 1:
                        cosines.append(cosine(found.rewards, true))
                right = debiasing is not None and debiasing.named in PAYS_FOR.get(weakness, ())
                named = (number if named is None else named) if right else None
            scorer.close()
        return round(fmean(cosines), 4), named

    (plain, _), (alone, _) = play(cheap), play(reference_judge)
    debiased = [play(cheap, Spread(reference_judge, 0), order) for order in range(orders)]
    cosines, named = zip(*debiased, strict=True)
    return {"method": name, "judge": plain, "repaired": cosines, "reader": alone, "named": named}


def main() -> None:
    """Print the table of methods, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="runs/toy_policy/policy", help="made by `run.py`")
    parser.add_argument("--methods", nargs="+", default=("grpo", "rankbuffer", "listwise_two"), metavar="METHOD")
    parser.add_argument("--weakness", default="", choices=["", *TRAITS])
    parser.add_argument("--strength", type=float, default=0.0)
    parser.add_argument("--orders", type=int, default=4, help="orders of the queries")
    arguments = parser.parse_args()
    quieten()
    settings = Settings(arguments.policy, EPOCHS * QUERIES, QUERIES, 1e-4, EPOCHS * G, NOISE)
    chosen = arguments.orders, arguments.weakness, arguments.strength
    rows = [study(name, settings, *chosen) for name in arguments.methods]
    table = Table(*(Column(name, justify="right") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    print(json.dumps({"benchmark": "toy_policy_untrained", "rows": rows}))


if __name__ == "__main__":
    main()
