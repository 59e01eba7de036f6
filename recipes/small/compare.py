"""Sample answers of two policies, show them side by side, and ask a judge which ones are better.

    python -m recipes.small.compare --config evaluation/small.yaml \
        --models before=HuggingFaceTB/SmolLM2-135M-Instruct after=runs/small

Both policies answer with the same settings and seeds. The n-th answer of one meets the n-th answer of the other, in
both orders of presentation. What is printed is the first answer of both to the first prompts of the file, whichever
is better. Answers and judgments are kept in `output_dir`, so the same command continues after a kill. The file of the
numbers has the answers and verdicts too, so that `score` can count them again.
"""

import asyncio
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation.benchmark import Prompt
from evaluation.config import EvaluationConfig
from evaluation.files import write_json
from evaluation.generate import check_label, label_path
from rankbuffer_tools.batch.ask import ask_many
from rankbuffer_tools.batch.engines import TransformersEngine, base_of
from rankbuffer_tools.batch.script import cost_line, run_script
from rankbuffer_tools.compare.duel import check_failures, points_of, share_of
from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import JudgeError, Question, Totals, pairwise_question
from rankbuffer_trl.judge.config import VerdictConfig
from rankbuffer_trl.judge.probabilities import Reading, lead
from rankbuffer_trl.monitoring.probes import repeated_share
from rankbuffer_trl.settings import check_at_least, documented

WIDTH = 56
Samples = Mapping[str, Sequence[tuple[str, int]]]
"""The answers of one policy by query, each with its number of tokens."""


@documented
@dataclass
class CompareConfig(VerdictConfig, EvaluationConfig):
    r"""
    Configuration of a comparison. It adds the parameters below to those of [`VerdictConfig`] and [`EvaluationConfig`].

    Parameters:
        dataset_name (`str`):
            The prompts, with rubrics.
        samples (`int`, *optional*, defaults to `4`):
            Answers of each policy to each prompt.
        show (`int`, *optional*, defaults to `5`):
            Number of prompts whose first answers are printed.
        no_rubrics (`bool`, *optional*, defaults to `False`):
            Leave the rubrics out of the judge's prompt.
    """

    dataset_name: str = ""
    samples: int = 4
    show: int = 5
    no_rubrics: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, samples=1, show=0)
        if len(self.models) != 2 or not self.dataset_name:
            raise SettingsError("name two models and a dataset_name, such as --models before=PATH after=PATH")
        if self.no_rubrics and not self.judge_url:
            raise SettingsError("no_rubrics needs a judge_url: the embedded judge reads nothing but rubrics")


def sample(config: CompareConfig, label: str, model: str, queries: Sequence[Query]) -> Samples:
    """Return the answers of one policy."""
    record = check_label(config, label, model)
    prompts = [Prompt(f"{query.id} {n}", query.prompt) for query in queries for n in range(config.samples)]
    engine = TransformersEngine(model, base_of(model), config)
    write_json(label_path(config, label), record)  # after the model was found: a typo must not take the label
    made = engine.answer(prompts, label_path(config, label).with_name("answers.jsonl"), f"sampling {label}")
    texts = [(text.strip(), call.usage.completion) for text, call in map(made.get, (p.id for p in prompts))]
    return {query.id: texts[i * config.samples :][: config.samples] for i, query in enumerate(queries)}


def measure(samples: Samples, limit: int) -> dict[str, float]:
    """Return what needs no judge: tokens, the share of answers that end, and that of repeated 4-grams of words."""
    every = [each for of_query in samples.values() for each in of_query]
    ended, repeated = fmean(tokens < limit for _, tokens in every), fmean(repeated_share(text) for text, _ in every)
    return {"tokens": fmean(tokens for _, tokens in every), "ended": ended, "repeated_4_grams": repeated}


def side_by_side(query: Query, labels: Sequence[str], answers: Sequence[str]) -> str:
    """Return two answers in two columns."""
    columns = [[label, "", *textwrap.wrap(text, WIDTH)] for label, text in zip(labels, answers, strict=True)]
    lines = [f"{left:{WIDTH + 2}}{right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    return "\n".join([f"\n== {query.text}", "", *lines])


def duels(config: CompareConfig, queries: Sequence[Query], before: Samples, after: Samples) -> dict[str, Question]:
    """Return two questions for each pair of answers: `forth` shows the second policy as B, `back` as A."""
    asked = {}
    for query in queries:
        for n, ((old, _), (new, _)) in enumerate(zip(before[query.id], after[query.id], strict=True)):
            for order, pair in {"forth": (old, new), "back": (new, old)}.items():
                question = pairwise_question(query, *pair, tie=False)
                if config.no_rubrics:
                    text = question.template.replace("\n\nRUBRICS\n{WEIGHTED_RUBRICS}", "")
                    question = replace(question, template=text.replace("query and weighted rubrics", "query"))
                asked[f"{query.id} {n} {order}"] = replace(question, soft=True)
    return asked


def ask(config: CompareConfig, questions: Mapping[str, Question]) -> dict[str, str | Reading]:
    """Return who wins each duel, `A` or `B`, as a [`Reading`] if the server gives probabilities."""
    log = Path(config.output_dir) / "duels.jsonl"
    first = dict(list(questions.items())[:1])
    tried = asyncio.run(ask_many(config.judge(), first, log, "asking for probabilities"))
    soft = not any("logprobs" in cause for cause in tried.failures.values())
    asked = {name: replace(question, soft=soft) for name, question in questions.items()}
    answers = asyncio.run(ask_many(config.judge(), asked, log, "asking the judge"))
    failed = [call for call in answers.asked.values() if call.failed]
    check_failures(config.judge(), failed, len(asked), config.judge_max_failures)
    paid = [*answers.asked.values(), *(call for call in tried.asked.values() if call.failed)]
    print(f"\njudge: {cost_line(config.endpoint, Totals.of(paid))}")
    return answers.values


def score(verdicts: Mapping[str, str | Reading]) -> dict[str, Any]:
    """Return how often the second policy wins. A pair needs both of its verdicts, and each query counts the same.

    Raises:
        [`JudgeError`]: if there is no verdict.
    """
    if not verdicts:
        raise JudgeError("no duel has a verdict: run the same command again to ask the open ones")
    words, odds, leads = defaultdict(list), defaultdict(list), defaultdict(list)
    said = {name: each.value if isinstance(each, Reading) else each for name, each in verdicts.items()}
    for pair in (name.removesuffix(" forth") for name in verdicts if name.endswith(" forth")):
        if (won := points_of(pair, said)) is None:
            continue
        id = pair.rpartition(" ")[0]
        words[id].append(won)
        forth, back = verdicts[f"{pair} forth"], verdicts[f"{pair} back"]
        if isinstance(forth, Reading) and isinstance(back, Reading):
            odds[id].append(points_of(pair, verdicts))
            leads[id].append(lead(forth, back) / 2)
    shares = {
        name: [fmean(each) for each in of.values()] for name, of in {"verdicts": words, "log odds": odds}.items()
    }
    return {
        "pairs": sum(map(len, words.values())),
        "first_shown_wins": fmean(word == "A" for word in said.values()),
        "wins": {name: share_of(of) for name, of in shares.items() if of},
        "mean_log_odds": fmean(map(fmean, leads.values())) if leads else None,
    }


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Return the numbers as lines."""
    (_, first), (label, second) = found["measures"].items()
    lines = [f"{name:18}{first[name]:10.3f}{second[name]:10.3f}" for name in first]
    lines = [f"{'':18}" + "".join(f"{each:>10}" for each in found["measures"]), *lines]
    lines += [
        f"by the {name}, {label} wins {share} of {found['pairs']:,} pairs" for name, share in found["wins"].items()
    ]
    if found["mean_log_odds"] is not None:
        lines.append(f"mean log odds of {label}: {found['mean_log_odds']:+.3f}")
    return [*lines, f"the answer that is shown first wins {found['first_shown_wins']:.0%} of all duels"]


def main(config: CompareConfig) -> int:
    """Sample, show, ask, and write the numbers."""
    table = QueryTable(load_queries(config.dataset_name))
    queries = [table[id] for id in table.ids][: config.limit]
    models = config.labelled_models()
    samples = {label: sample(config, label, model, queries) for label, model in models.items()}
    for query in queries[: config.show]:
        print(side_by_side(query, list(models), [of[query.id][0][0] for of in samples.values()]))
    measures = {label: measure(of, config.max_new_tokens) for label, of in samples.items()}
    verdicts = ask(config, duels(config, queries, *samples.values()))
    found = {"models": models, "judge": config.judge_model, "measures": measures, **score(verdicts)}
    print("", *lines_of(found), sep="\n")
    path = Path(config.output_dir) / ("without_rubrics.json" if config.no_rubrics else "with_rubrics.json")
    said = {name: each.as_dict() if isinstance(each, Reading) else each for name, each in verdicts.items()}
    kept = {"wins": {name: asdict(share) for name, share in found["wins"].items()}, "answers": samples}
    write_json(path, found | kept | {"verdicts": said})
    print(f"Numbers: {path}")
    return 0


if __name__ == "__main__":
    run_script(CompareConfig, main)
