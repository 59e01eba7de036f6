"""The command `rankbuffer-rejudge`: judge the stored rollouts of a run again, after an estimate of the cost.

    rankbuffer-rejudge --run_dir runs/mine --dataset_name data/mine.jsonl --judge_url URL --judge_model NAME
    rankbuffer-rejudge --run_dir runs/mine --dataset_name data/mine.jsonl --mode duel --dry_run true

The first line replays recorded groups with another judge. The second one prints the price of duels.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import replacing
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.judge.endpoint import Endpoint
from rankbuffer_trl.store import history

from ..jobs import script as recipe
from ..jobs.ask import ask_many
from ..jobs.output import beside
from ..jobs.reach import estimate_tokens
from ..report.runs import Run, open_runs
from .config import RejudgeConfig
from .duel import draw, questions_of, read_answers
from .replay import Visits, check_failures, measure, price_of, read_visits, replay


def rejudge(config: RejudgeConfig) -> int:
    """Print the price, ask, and write the result. Return the exit code.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    with open_runs([config.run_dir]) as (run,):
        check_rubrics(run)
        found = duel(config, run) if config.mode == "duel" else replay_run(config, run)
    if found is None:
        return 0
    with replacing(config.result) as draft:
        draft.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"Numbers: {config.result}. Answers: {beside(config.result, 'answers.jsonl')}.")
    return 0


def replay_run(config: RejudgeConfig, run: Run) -> dict[str, Any] | None:
    """Replay a run and print the comparison with the recorded rewards. Return it, `None` after a dry run."""
    name, method = config.reward_method(run.manifest)
    queries = config.queries(method.responses_needed)
    settings = run.manifest.get("config", {})
    visits = read_visits(run.store, queries, config.sample, config.epochs, config.seed)
    recorded = recorded_totals(run, visits)
    same_method = name == run.manifest.get("method")
    judge = config.judge()
    groups = sum(map(len, visits.values()))
    known = recorded if same_method else Totals()
    price = price_of(visits, method, judge.guard, known, config.judge_samples)
    what = f"{groups:,} groups of {len(visits):,} queries"
    recipe.announce(config.endpoint, what, *price, config.log, by_characters=not known.prompt_tokens)
    if config.dry_run:
        return None
    scores, calls = asyncio.run(replay(visits, method, judge, config.log, price[0][1], config.judge_max_failures))
    found: dict[str, Any] = {"run": history.run_id(run.store), "queries": len(visits), "groups": groups}
    found |= {"epochs": config.epochs, "seed": config.seed, "dataset": config.dataset_name}
    if config.method is None and not config.method_args:  # another method may read other columns
        found["same_data"] = queries.sha256 == run.manifest.get("data_sha256")
    priced = ("prompt_price", "cached_price", "completion_price")
    prices = Endpoint(**{each: settings.get(f"judge_{each}") for each in priced})  # type: ignore[arg-type]
    found["recorded"] = {key: run.manifest.get(key) for key in ("judge", "judge_guard", "method", "method_args")}
    found["recorded"] |= {"totals": recorded.as_dict(), "price": prices.price(recorded)}
    spent = Totals.of(calls)
    arguments = json.loads(json.dumps(asdict(method), default=str))
    found["replayed"] = {
        "judge": config.named, "judge_guard": judge.guard, "method": name, "method_args": arguments,
        "totals": spent.as_dict(), "price": config.endpoint.price(spent),
    }  # fmt: skip
    found["measures"] = measure(visits, scores, config.seed)
    print(*replay_lines(found), sep="\n")
    return found


def check_rubrics(run: Run) -> None:
    """Refuse a run whose visits left out rubrics, by a setting that is gone: their questions cannot be repeated."""
    if run.manifest.get("config", {}).get("rubric_dropout"):
        raise SettingsError(
            f"{run.path} was trained with rubric_dropout, which drew the rubrics of each visit: use the version"
            " of rankbuffer-trl that its run.json names"
        )


def recorded_totals(run: Run, visits: Visits) -> Totals:
    """Return what the recorded judgments of the visits cost."""
    ledger = history.totals_by_visit(run.store)
    steps = ((query_id, visit.row.step) for query_id, each in visits.items() for visit in each)
    return sum((ledger.get(key, Totals()) for key in steps), Totals())


def replay_lines(found: Mapping[str, Any]) -> list[str]:
    """Return what a replay found as lines."""
    lines = [
        f"{side}: judge {of['judge']}, judge_guard {of['judge_guard']}, method {of['method']} {of['method_args']}"
        for side, of in ((side, found[side]) for side in ("recorded", "replayed"))
    ]
    if not found.get("same_data", True):
        lines.append("the data set differs from that of the run")
    for name, one in found["measures"].items():
        few = " (too few queries for an interval)" if one["queries"] else ""
        span = few if one["low"] is None else f" ({one['low']:.3f} to {one['high']:.3f})"
        value = "-" if one["value"] is None else f"{one['value']:.3f}"
        lines.append(f"{name.replace('_', ' '):32} {value}{span}")
    for side in ("recorded", "replayed"):
        totals = Totals(**found[side]["totals"])
        price = found[side]["price"]
        cost = "" if price is None else f", {price:,.4f}"
        lines.append(f"{side + ' judging':32} {totals.calls:,} calls, {totals.spent_tokens:,} tokens{cost}")
    return lines


def duel(config: RejudgeConfig, run: Run) -> dict[str, Any] | None:
    """Compare responses of the first and the last epoch, and print the result. Return it, `None` after a dry run."""
    queries, judge = config.queries(), config.judge()
    drawn = draw(run.store, config.duels, config.control, config.seed)
    questions = questions_of(drawn, queries, config.probabilities)
    tokens = estimate_tokens(questions.values(), judge.guard, config.judge_samples)
    what = f"{len(drawn.duels):,} duels in both orders, {len(drawn.control):,} insertions"
    recipe.announce(config.endpoint, what, (len(questions), len(questions)), *tokens, config.log)
    if config.dry_run:
        return None
    answers = asyncio.run(ask_many(judge, questions, config.log, "asking the judge"))
    check_failures(judge, [call for call in answers.calls if call.failed], len(answers.asked), config.judge_max_failures)
    n, won, control = read_answers(drawn, answers.values)
    first, last = drawn.epochs
    print(f"epoch {last} beats epoch {first} in {won} of {n:,} duels over {won.queries:,} queries")
    if drawn.control:
        print(f"control, {len(drawn.control):,} first-epoch responses inserted again (50 % is right): {control}")
    found: dict[str, Any] = {"run": history.run_id(run.store), "judge": config.named, "seed": config.seed}
    found |= {"epochs": drawn.epochs, "probabilities": config.probabilities, "duels": n, "won": asdict(won)}
    return found | {"insertions": len(drawn.control), "control": asdict(control)}


def main() -> None:
    recipe.run(RejudgeConfig, rejudge)


if __name__ == "__main__":
    main()
