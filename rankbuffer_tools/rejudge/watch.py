"""The watching reader: pairs of old and new responses, drawn from a store while it grows, and put to two judges. Ours.

`evidence.py` says what is tested, and how a pair is drawn. This file decides when: the steps of the run are gone
through in their order, and after each step pairs are drawn as long as the tokens so far stay below a share of those in
the run's ledger. What a pair waits for is a function of the pairs before it, see [`needed`]. So a reader that comes
late draws after the same steps as one that was there from the beginning, if the answers cost the same. All that is
known stands in the result, which is written whole after each round of questions. A copy of the store is read, as for a
report, and the lock of the run is looked at, never taken.
"""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rankbuffer_trl.data.queries import GENERIC, QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import is_locked, replacing
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import Call, Question, RubricJudge, Totals, pairwise_question
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.store import BufferStore, history
from rankbuffer_trl.store.history import ResponseRow
from rankbuffer_trl.store.places import LIVE_STORE

from ..jobs import script as recipe
from ..jobs.ask import ask_many, hash_question
from ..jobs.reach import estimate_tokens
from ..report.evidence import Watch, WatchedPair, read_watch
from ..report.runs import Run, open_runs
from .config import RejudgeConfig, named
from .duel import duel_questions, points_of
from .replay import check_failures

WAIT = 60.0  # seconds between two looks at a run that trains
BLOCK = 8  # pairs that are asked at once: few, because the run needs its judge
SAMPLE = pairwise_question(Query("", [{"role": "user", "content": "?"}], GENERIC), "A", "B", tie=False)
Drawn = tuple[str, ResponseRow, ResponseRow]  # a query, an old response and a new one


@dataclass(frozen=True)
class Side:
    """One of the two judges, `judge` or `reader`: its settings, and whether it sees the rubrics of the queries."""

    name: str
    config: JudgeConfig
    rubrics: bool
    queries: QueryTable
    probabilities: bool = False

    @cached_property
    def digest(self) -> str:
        """The hash of one request of the judge: all that its settings change in a verdict, and no address or key."""
        soft = self.probabilities and self.config.judge_samples > 1  # which a question without them does not show
        return hash_question(self.config.judge(), replace(SAMPLE, soft=soft))

    def questions(self, drawn: Sequence[Drawn]) -> dict[str, Question]:
        """Return two questions for each pair by name. Two judges may have one name, so the side is a part of it."""
        seen = {id: self.queries[id] for id, _, _ in drawn}
        if not self.rubrics:
            seen = {id: replace(query, rubrics=GENERIC) for id, query in seen.items()}
        pairs = {f"{self.name} {id} {old.id} {new.id}": (id, old, new) for id, old, new in drawn}
        return duel_questions(pairs, seen, self.probabilities)

    def tokens(self, questions: Mapping[str, Question]) -> tuple[float, float]:
        """Estimate the prompt and completion tokens of questions."""
        return estimate_tokens(questions.values(), self.config.judge_guard, self.config.judge_samples)


def first_of_block(number: int) -> int:
    """Return the number of the first pair of a block. The first pair is a block, then every `BLOCK` pairs are one."""
    return max(0, (number - 1) // BLOCK * BLOCK + 1)


def needed(pairs: Sequence[WatchedPair]) -> int:
    """Return how many tokens a watch must be allowed before the pair that comes after `pairs` is drawn.

    Pairs of earlier blocks count with what they cost. Those of the same block may be without answers. So each counts
    with its estimate, or with the dearest pair of earlier blocks if that is more, whether or not it has answers. As
    much as the dearest of all is held back for the next pair, since a pair's tokens must not decide whether it is
    drawn. So a block can cost more than is allowed only if one of its pairs costs more than any pair before the block.
    """
    first = first_of_block(len(pairs))
    spent = [pair.tokens for pair in pairs[:first]]
    dearest = max(spent, default=0)
    held = [max(pair.estimate, dearest) for pair in pairs[first:]]
    return sum(spent) + sum(held) + max(held, default=dearest)


def next_pairs(
    store: BufferStore, sides: Sequence[Side], begun: Watch, share: float
) -> tuple[list[WatchedPair], list[Drawn], str]:
    """Draw the next pairs, of one block at most.

    Args:
        store (`BufferStore`):
            The store of the run.
        sides (`Sequence[Side]`):
            The judge of the run and the reader.
        begun (`Watch`):
            The pairs so far, and the seed.
        share (`float`):
            What all pairs may cost, in tokens, as a share of the run's ledger up to the step of the draw.

    Returns:
        `tuple[list, list, str]`: the pairs with an estimate of their tokens, their texts, and why there are no more.
    """
    pairs, texts, asked = list(begun.pairs), [], len(begun.pairs)
    last = pairs[-1].step if pairs else 0
    ledger, allowed = history.totals_by(store, "step"), 0.0
    visited: dict[str, dict[int, int]] = defaultdict(dict)  # the epoch by step, of each query
    for step, visits in groupby(history.visits_in_order(store), key=itemgetter(0)):
        allowed += share * ledger.get(step, Totals()).spent_tokens
        for _, query_id, epoch in visits:
            visited[query_id][step] = epoch
        while step >= last and first_of_block(len(pairs)) <= asked and needed(pairs) < allowed:
            drawn = draw_pair(store, visited, random.Random(f"{begun.seed} {len(pairs)}"))
            if drawn is None:
                break
            id, old, new = drawn
            estimate = round(sum(sum(side.tokens(side.questions([drawn]))) for side in sides))
            pairs.append(WatchedPair(id, old.id, new.id, step, visited[id][new.step], estimate, estimate=estimate))
            texts.append(drawn)
    cause = f"reader_share={share:g} of the tokens in the run's ledger allows no further pair"
    if draw_pair(store, visited, random.Random(0)) is None:
        cause = "no query of the run has two visits with answers, so there is nothing to compare"
    return pairs[asked:], texts, cause


def draw_pair(store: BufferStore, visited: Mapping[str, Mapping[int, int]], random_: random.Random) -> Drawn | None:
    """Draw a query with two answered visits, a response of the first one and a response of the newest one.

    Args:
        store (`BufferStore`):
            The store of the run.
        visited (`Mapping[str, Mapping[int, int]]`):
            The visits so far, by query and step.
        random_ (`random.Random`):
            The generator of this draw alone.
    """
    ids = [id for id, steps in visited.items() if len(steps) > 1]
    for id in random_.sample(ids, len(ids)):
        answered: dict[int, list[ResponseRow]] = defaultdict(list)
        for response in history.responses(store, id):
            if not response.initial and response.step in visited[id]:
                answered[response.step].append(response)
        if len(answered) > 1:
            return id, random_.choice(answered[min(answered)]), random_.choice(answered[max(answered)])
    return None


def ask(
    pairs: Sequence[WatchedPair],
    drawn: Sequence[Drawn],
    sides: Sequence[Side],
    log: Path | None,
    calls: dict[str, list[Call]],
) -> list[WatchedPair]:
    """Ask both judges. Return the pairs with what was said and what that cost.

    A pair costs at least its estimate, because a server may count no tokens.

    Raises:
        [`JudgeError`]: if a judge cannot be reached, or too many of its `calls` since the start failed.
    """
    verdicts: dict[str, Any] = {}
    asked: dict[str, Call] = {}
    for side in sides:
        client = side.config.judge()
        answers = asyncio.run(ask_many(client, side.questions(drawn), log, f"asking the {side.name}"))
        calls[side.name] += answers.asked.values()
        failed = [call for call in calls[side.name] if call.failed]
        if len(failed) > 1:  # the first round is one pair, and one failure of two questions is chance
            check_failures(client, failed, len(calls[side.name]), side.config.judge_max_failures)
        verdicts |= answers.values
        asked |= answers.asked
    found = []
    for pair in pairs:
        names = [f"{side.name} {pair.query_id} {pair.old} {pair.new}" for side in sides]
        spent = Totals.of(asked[f"{name} {order}"] for name in names for order in ("forth", "back"))
        judge, reader = (points_of(name, verdicts) for name in names)
        found.append(replace(pair, tokens=max(pair.tokens, spent.spent_tokens), judge=judge, reader=reader))
    return found


def watch(config: RejudgeConfig) -> int:
    """Let a reader read beside a run until no process trains it any more. Return the exit code.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    queries, path = config.queries(), Path(config.run_dir)
    sides = [
        Side(name, each, name == "judge" or config.reader_rubrics, queries, config.probabilities)
        for name, each in config.judges().items()
    ]
    lock = (path if path.is_file() else path / LIVE_STORE).with_suffix(".lock")
    calls: dict[str, list[Call]] = defaultdict(list)
    said = ""
    with open_runs([path]) as (run,):
        announce_watch(config, run, sides)
    while not config.dry_run:
        trains = is_locked(lock)  # before the look, which then has the last step
        with open_runs([path]) as (run,):
            begun = begin(config, run, sides)
            pairs, drawn, cause = next_pairs(run.store, sides, begun, config.reader_share)
        if pairs:
            begun = replace(begun, pairs=begun.pairs + ask(pairs, drawn, sides, config.log, calls))
            write(config.result, begun)
            print(line_of(begun), flush=True)
        elif trains:
            if said != cause:
                print(f"[watch] {cause}: waiting", flush=True)
            said = cause
            time.sleep(WAIT)
        elif not begun.pairs:
            raise SettingsError(f"{cause}, and no process trains it now")
        else:
            print("[watch] no process trains the run now, and all pairs are judged. If it is resumed, run this again")
            print(f"Numbers: {config.result}. Answers: {config.log}.")
            break
    return 0


def begin(config: RejudgeConfig, run: Run, sides: Sequence[Side]) -> Watch:
    """Return the watch as its file holds it, or a new one.

    Raises:
        [`SettingsError`]: if the file has the pairs of another run or of other settings, which must not be mixed.
    """
    judge, reader = (named(side.config) for side in sides)
    rules = (config.reader_rubrics, config.probabilities, config.seed, config.tolerance, config.false_alarm_rate)
    new = Watch(history.run_id(run.store), judge, reader, *rules, [], *(side.digest for side in sides))
    old = read_watch(config.result) or new
    old = replace(
        old, **{name: getattr(old, name) or getattr(new, name) for name in ("judge_digest", "reader_digest")}
    )
    names = [each.name for each in fields(Watch) if each.name != "pairs"]
    if differ := [name for name in names if getattr(old, name) != getattr(new, name)]:
        raise SettingsError(
            f"{config.result} was begun with another {', '.join(differ)}: repeat its settings, or name another file"
            " with --output"
        )
    return old


def announce_watch(config: RejudgeConfig, run: Run, sides: Sequence[Side]) -> None:
    """Print what the pairs that are due now will cost, and what is odd about the two judges."""
    begun, due = begin(config, run, sides), []
    while (found := next_pairs(run.store, sides, begun, config.reader_share))[0]:  # if each costs what is expected
        begun = replace(begun, pairs=begun.pairs + found[0])
        due += found[1]
    for side in sides:
        asked = side.questions(due)
        what = f"{side.name} {named(side.config)}, {len(due):,} pairs that are due"
        recipe.announce(side.config.endpoint, what, (len(asked), len(asked)), *side.tokens(asked), config.log)
    print(f"[price] while the run goes on, both together take {config.reader_share:g} of its judge's tokens at most")
    if sides[0].config == sides[1].config:
        how = "the same rubrics, so the two cannot part" if config.reader_rubrics else "no rubrics of the query"
        print(f"[watch] the reader is the judge of the run, and sees {how}")
    mine, trained = config.judge_model or RubricJudge.__name__, run.manifest.get("judge")
    if trained not in (None, mine) and not config.judge_client:
        print(f"[watch] the run was trained by {trained!r}, and not by {mine!r}: name its judge")


def write(file: Path, begun: Watch) -> None:
    """Write the pairs, and what follows from them for people."""
    found = asdict(begun) | {"e_value": begun.e_value, "alarm": begun.alarm}
    with replacing(file) as draft:
        draft.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def line_of(begun: Watch) -> str:
    """Say in one line what both judges see in the newest epoch, and whether they part."""
    start = f"[watch] step {begun.pairs[-1].step}"
    if not (epochs := begun.by_epoch()):
        return f"{start}: no pair has all of its verdicts"
    new = epochs[-1]
    return (
        f"{start}, epoch {new['epoch']}: of {new['pairs']:,} pairs, the new response wins {100 * new['judge']:.0f} %"
        f" by the judge and {100 * new['reader']:.0f} % by the reader; {begun.verdict}"
    )
