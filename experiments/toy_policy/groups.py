"""How well do the rewards of each method order the toy policy's groups, before any training?

    python -m experiments.toy_policy.groups

The policy and the judge are the toy policy's, and so are the rows (`run.py`). The rewards are those of
a first visit: every query has its first anchors. They are compared with the true qualities of the group by Kendall's
tau-b and by the cosine, which says how far an advantage points in the right direction. Groups of one true quality do
not count.

Many of this policy's rollouts repeat another one of their group word for word, and the judge sees equal words alike.
This helps some methods more than others. So each method is measured twice: on groups as they are sampled, and on
groups of 8 rollouts with different words.
"""

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from datasets import Dataset
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.toy_policy.judge import NoisyRubricJudge
from experiments.toy_policy.run import (
    ALL,
    BESIDE,
    OURS,
    G,
    Run,
    Settings,
    cosine,
    measure_start,
    policy,
    quieten,
    recipe_arguments,
    repeated,
    sample,
    true_quality,
)
from rankbuffer_tools.audit.measures import tau_b
from rankbuffer_trl.data import QueryTable, load_queries
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.rewards import RewardMethod, load_method

GROUPS = {"as sampled": list, "different words": lambda texts: list(dict.fromkeys(texts))}


def cut(samples: Sequence[Sequence[str]], queries: Dataset, groups: int, kind: str) -> list[RolloutGroup]:
    """Cut the samples of each query into at most `groups` groups of a kind of `GROUPS`."""
    table, found = QueryTable(queries, anchors_needed=2), []
    for query_id, texts in zip(table.ids, samples, strict=True):
        chosen = GROUPS[kind](texts)[: groups * G]
        for start in range(0, len(chosen) - G + 1, G):
            rollouts = tuple(Rollout(i, text) for i, text in enumerate(chosen[start : start + G]))
            found.append(RolloutGroup(table[query_id], rollouts, step=start, epoch=0))
    return found


async def measure(method: RewardMethod, groups: Iterable[RolloutGroup], judge: Judge, quality) -> tuple[float, float]:
    """Return the means over groups of tau-b and of the cosine between a method's rewards and the true qualities."""
    taus, cosines = [], []
    for group in groups:
        score = await method.score(group, None, judge)
        rewards = [score.rewards[rollout.id] for rollout in group.answered]
        worth = [quality(group.query.id, rollout.text) for rollout in group.answered]
        if len(set(worth)) > 1:
            taus.append(tau_b(rewards, worth))
            cosines.append(cosine(rewards, worth))
    return fmean(taus), fmean(cosines)


def main() -> None:
    """Sample the groups, score them with every method, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/toy_policy/policy"), help="made if it is missing")
    parser.add_argument("--methods", nargs="+", choices=(*ALL, *OURS), default=(*BESIDE, *OURS), metavar="METHOD")
    parser.add_argument("--noise", nargs="+", type=float, default=(0.09, 0.3), help="errors of the judge")
    parser.add_argument("--groups", type=int, default=4, help="groups of each query")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=0.95)
    arguments = parser.parse_args()
    quieten()
    queries = load_queries(str(policy.DATA))
    policy.build_policy(arguments.policy, queries)
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    settings = Settings(str(arguments.policy), 1, 1, 1e-4, 2 * G, 0.0, **sampling)
    mean, deviation = measure_start(settings)
    tokenizer = AutoTokenizer.from_pretrained(arguments.policy)
    model = AutoModelForCausalLM.from_pretrained(arguments.policy)
    rounds = [sample(model, tokenizer, queries, settings, seed) for seed in range(arguments.groups)]
    samples = [[text for texts in same for text in texts] for same in zip(*rounds, strict=True)]
    groups = {kind: cut(samples, queries, arguments.groups, kind) for kind in GROUPS}
    share = fmean(again for group in groups["as sampled"] for again in repeated(r.text for r in group.rollouts))

    columns = [(noise, kind) for noise in arguments.noise for kind in GROUPS]
    table = Table("method", *(Column(f"noise {noise:g}, {kind}", justify="right") for noise, kind in columns))
    counts = ", ".join(f"{len(each)} {kind}" for kind, each in groups.items())
    table.title = f"Tau / cosine at temperature {arguments.temperature:g}; {share:.0%} repeated; groups: {counts}"
    quality = true_quality(queries)
    line: dict = {"benchmark": "toy_policy_groups", **sampling, "repeated": round(share, 4), "methods": {}}
    for name in arguments.methods:
        args = recipe_arguments(Run(name, 0, settings, mean, deviation, "unused"))
        method = load_method(args.method, args.method_args or {}, args.seed)
        found = []
        for noise, kind in columns:
            judge = Judge(NoisyRubricJudge(mean, deviation, noise), guard=args.judge_guard)
            found.append(asyncio.run(measure(method, groups[kind], judge, quality)))
        table.add_row(name, *(f"{tau:.2f} / {cos:.2f}" for tau, cos in found))
        line["methods"][name] = [[round(x, 4) for x in each] for each in found]
    Console(width=140, highlight=False).print(table)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
