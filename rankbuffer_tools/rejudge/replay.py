"""Replay recorded groups with another judge, other rubrics, another prompt or another method, and compare the rewards.

The visits of a query follow each other as in the run. The first one starts without a buffer. The replayed verdicts
then change the buffer. The rollouts are those of the run: what another policy would have written is not known.
"""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rankbuffer_trl.data.queries import QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Askable, Call, Judge, JudgeError, Totals
from rankbuffer_trl.judge.errors import first_leaf
from rankbuffer_trl.judge.judge import explain
from rankbuffer_trl.rewards.listen import first_questions
from rankbuffer_trl.rewards.method import GroupScore, RewardMethod
from rankbuffer_trl.store import BufferStore, history
from rankbuffer_trl.store.history import GroupRow

from ..audit.measures import interval, tau_b
from ..jobs.ask import AnswerLog, hash_question, progress
from ..jobs.reach import check_servers, estimate_tokens
from ..report.tables import group_advantages


@dataclass(frozen=True)
class RecordedVisit:
    """A group with its rollouts, and what was recorded of it."""

    group: RolloutGroup
    row: GroupRow


Visits = Mapping[str, Sequence[RecordedVisit]]
"""The visits of each query in their order."""


def read_visits(
    store: BufferStore,
    queries: QueryTable,
    sample: int,
    epochs: int | None,
    seed: int,
) -> Visits:
    """Return the recorded visits of queries that are drawn at random.

    Args:
        store (`BufferStore`):
            The store of the run.
        queries (`QueryTable`):
            The prompts, rubrics and references of the replay.
        sample (`int`):
            Number of queries. If the run has fewer, all of them are taken.
        epochs (`int`, *optional*):
            Number of epochs from the first one. `None` takes all.
        seed (`int`):
            The seed of the draw.

    Raises:
        [`DataError`]: if the data set lacks a query.
        [`SettingsError`]: if the run has no group in these epochs.
    """
    rows = defaultdict(list)
    for row in history.groups(store):
        if epochs is None or row.epoch < epochs:
            rows[row.query_id].append(row)
    if not rows:
        raise SettingsError(
            f"the run has no group in its first epochs={epochs}: its epochs are {history.epochs(store)}"
        )
    drawn = random.Random(seed).sample(list(rows), min(sample, len(rows)))
    found: dict[str, list[RecordedVisit]] = {}
    for query_id in drawn:
        query = queries[query_id]
        texts = {response.id: response.text for response in history.responses(store, query_id)}
        found[query_id] = []
        for row in rows[query_id]:
            # The store has no text of a rollout without an answer.
            rollouts = tuple(Rollout(i, texts.get(f"{row.step}-{i}", "")) for i in range(len(row.rewards)))
            found[query_id].append(RecordedVisit(RolloutGroup(query, rollouts, row.step, row.epoch), row))
    return found


class KeptJudge(Judge):
    """A judge that writes each answer to a log, and asks no question whose answer is there.

    A question that a query asks twice gets two answers, as in training. So answers are numbered.

    Args:
        judge (`Judge`):
            The judge to ask.
        method (`str`):
            The reward method, for the ledger.
        log (`AnswerLog`):
            The log.
        most (`int`):
            Number of questions to come, at most.
        max_failures (`float`):
            Share of these questions, in 0..1, above which failures end the replay.
    """

    def __init__(self, judge: Judge, method: str, log: AnswerLog, most: int, max_failures: float):
        super().__init__(judge.client, judge.max_attempts, judge.guard, method)
        self._log = log
        self._most = most
        self._max_failures = max_failures
        self._asked: Counter[str] = Counter()
        self._failed: list[Call] = []

    async def ask_with_cost(self, question: Askable) -> tuple[Any | None, Call]:
        """Answer as [`Judge.ask_with_cost`] does, from the log if the answer is there.

        Raises:
            [`JudgeError`]: as soon as too many questions have failed.
        """
        name = f"{question.query_id} {hash_question(self, question)}"
        self._asked[name] += 1
        key = f"{name} {self._asked[name]}"
        if key in self._log:
            call = self._log.call(key)
            self.calls.append(call)
            return self._log[key], call
        verdict, call = await super().ask_with_cost(question)
        if call.failed:
            self._failed.append(call)
            check_failures(self, self._failed, self._most, self._max_failures)
        else:
            self._log.add(key, verdict, call)
        return verdict, call


def check_failures(judge: Judge, failed: Sequence[Call], of: int, most: float) -> None:
    """Refuse a result of which too many judgments failed.

    Raises:
        [`JudgeError`]: if the share of failed judgments is above `most`.
    """
    if failed and len(failed) > most * of:
        raise JudgeError(
            f"the judge ({judge.client.name}) failed {len(failed)} of {of} judgments, more than"
            f" judge_max_failures={most:g} allows. {explain(failed[-1])} The answers so far are kept: run the same"
            " command again to ask the others"
        )


async def replay(
    visits: Visits, method: RewardMethod, judge: Judge, log: Path | None, most: int, max_failures: float
) -> tuple[dict[str, list[GroupScore]], list[Call]]:
    """Score all visits again, the queries at once and the visits of a query one after the other.

    Args:
        visits (`Visits`):
            The recorded visits.
        method (`RewardMethod`):
            The method that scores.
        judge (`Judge`):
            The judge that the method asks. Its connections are closed afterwards.
        log (`Path`, *optional*):
            File of the answers, see [`AnswerLog`].
        most (`int`):
            Number of questions to come, at most.
        max_failures (`float`):
            Share of these questions, in 0..1, above which failures end the replay.

    Returns:
        `tuple[dict[str, list[GroupScore]], list[Call]]`: the scores of each query's visits, and the calls, also those
        of earlier runs whose answers were in the log.

    Raises:
        [`JudgeError`]: if the judge is not there, or fails too often.
    """
    first = [question for each in visits.values() for question in first_questions(method, each[0].group)]
    try:
        with AnswerLog(log) as answers, progress() as shown:
            kept = KeptJudge(judge, method.name, answers, most, max_failures)
            await check_servers(kept, first)
            bar = shown.add_task("replaying visits", total=sum(map(len, visits.values())))

            async def follow(each: Sequence[RecordedVisit]) -> list[GroupScore]:
                buffer, scores = None, []
                for visit in each:
                    scores.append(await method.score(visit.group, buffer, kept))
                    buffer = scores[-1].after or buffer  # a visit without a next buffer leaves the old one
                    shown.advance(bar)
                return scores

            async with asyncio.TaskGroup() as tasks:
                scored = {query_id: tasks.create_task(follow(each)) for query_id, each in visits.items()}
            calls = kept.drain()
            check_failures(kept, [call for call in calls if call.failed], len(calls), max_failures)
            return {query_id: task.result() for query_id, task in scored.items()}, calls
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from errors
    finally:
        await judge.client.close()


def price_of(
    visits: Visits, method: RewardMethod, guard: bool, recorded: Totals, samples: int = 1
) -> tuple[tuple[int, int], float, float]:
    """Return how many questions a replay asks at least and at most, and how many tokens these have at most.

    Args:
        visits (`Visits`):
            The recorded visits.
        method (`RewardMethod`):
            The method that scores.
        guard (`bool`):
            Whether prompts quote responses.
        recorded (`Totals`):
            What these visits cost in the run, if the method is the same. The estimate then takes the tokens of its
            judgments. Else it takes those of a query's first questions, which are shorter where a buffer grows.
        samples (`int`, *optional*, defaults to `1`):
            Answers to a question whose probabilities are read (`judge_samples`).

    Returns:
        `tuple[tuple[int, int], float, float]`: the questions, their prompt tokens and their completion tokens.
    """
    counts = [method.calls(visit.group, place == 0) for each in visits.values() for place, visit in enumerate(each)]
    low, high = (sum(count[end] for count in counts) for end in (0, 1))
    if recorded.prompt_tokens:
        prompt, completion = recorded.prompt_tokens, recorded.completion_tokens
        return (low, high), high * prompt / recorded.calls, high * completion / recorded.calls
    asked = [question for each in visits.values() for question in first_questions(method, each[0].group)]
    prompt_tokens, completion_tokens = estimate_tokens(asked, guard, samples)
    share = high / max(len(asked), 1)
    return (low, high), share * prompt_tokens, share * completion_tokens


def measure(visits: Visits, scores: Mapping[str, Sequence[GroupScore]], seed: int) -> dict[str, dict[str, Any]]:
    """Compare the recorded rewards with the replayed ones.

    Each query has the same weight. A value is the mean over the groups or rollouts of a query, and then over the
    queries. Its 95 % interval is a bootstrap over queries. Rewards that one of the two sides lacks are left out.

    * `signs_turned`: the share of advantages that change from above 0 to below 0, or back. Advantages are those of
      GRPO, normalised within the group.
    * `cosine`: the cosine of the two advantage vectors of a group. It is 0 if all advantages of one side are 0. The
      group is left out if those of both sides are.
    * `tau`: Kendall's tau-b of the two orders of a group's answered rollouts.
    * `same_rewards`: the share of equal rewards.
    * `ties_recorded`, `ties_replayed`: the share of answered rollouts whose reward another one of the group has too.
    * `unscored_recorded`, `unscored_replayed`: the share of rollouts without a reward.

    Args:
        visits (`Visits`):
            The recorded visits.
        scores (`Mapping[str, Sequence[GroupScore]]`):
            The replayed scores of each query's visits.
        seed (`int`):
            Seed of the intervals.

    Returns:
        `dict[str, dict]`: `value`, `low`, `high` and the number of `queries` by name. They are `None` if no query has
        a value.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for query_id, each in visits.items():
        for visit, score in zip(each, scores[query_id], strict=True):
            for name, values in compare_group(visit.group, visit.row.rewards, score.rewards).items():
                found[name][query_id] += values
    measures = {}
    for name, by_query in found.items():
        means = [fmean(values) for values in by_query.values() if values]
        low, high = interval(means, seed) or (None, None)
        measures[name] = {"value": fmean(means) if means else None, "low": low, "high": high, "queries": len(means)}
    return measures


def compare_group(
    group: RolloutGroup, recorded: Sequence[float | None], replayed: Sequence[float | None]
) -> dict[str, list[float]]:
    """Return the values of each measure of [`measure`] for one group."""
    sides = [recorded, replayed]
    both = [(i, a, b) for i, (a, b) in enumerate(zip(*sides, strict=True)) if a is not None and b is not None]
    # Rounded, since the mean of equal rewards may differ from them in its last digit.
    old, new = ([a and round(a, 9) for a in group_advantages(side)] for side in sides)
    pairs = [(old[i] or 0.0, new[i] or 0.0) for i, _, _ in both]
    lengths = [math.hypot(*(pair[side] for pair in pairs)) for side in (0, 1)]
    cosine = sum(a * b for a, b in pairs) / math.prod(lengths) if all(lengths) else 0.0
    answered = {rollout.id for rollout in group.answered}
    ranked = [(a, b) for i, a, b in both if i in answered]
    found: dict[str, list[float]] = {
        "signs_turned": [float(a * b < 0) for a, b in pairs],
        "cosine": [cosine] if any(lengths) else [],
        "tau": [tau_b([a for a, _ in ranked], [b for _, b in ranked])] if len(ranked) > 1 else [],
        "same_rewards": [float(a == b) for _, a, b in both],
    }
    for name, side in zip(("recorded", "replayed"), sides, strict=True):
        counts = Counter(side[i] for i in answered if side[i] is not None)
        found[f"ties_{name}"] = [float(counts[side[i]] > 1) for i in answered if side[i] is not None]
        found[f"unscored_{name}"] = [float(reward is None) for reward in side]
    return found
