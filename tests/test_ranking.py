"""Coarse-to-fine ranking, rank rewards and RankBuffer's score, against slow oracles; the judge follows a table."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from conftest import scripted_judge, unreachable
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, bootstrap_buffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.ranking import INSERTION_BINS, coarse_to_fine, insertion_bin, rank_rewards
from rankbuffer_trl.rewards._rankbuffer import RankBuffer

QUERY = Query(
    id="tea",
    prompt=[{"role": "user", "content": "How do I make tea?"}],
    rubrics=(Rubric("Says how long to wait.", 5),),
    responses=tuple(f"reference {i}" for i in range(7)),
)
MALFORMED, DOWN, LATE, FINE = "malformed", "unreachable", "malformed once", "answered"


# The judge: reads ids out of the prompt and answers from a table that the code under test does not see.


@dataclass
class Table:
    """`position` and `quality` by rollout id; `coarse` and `listwise` say how a question about an id or ids goes."""

    position: dict[int, int] = field(default_factory=dict)
    quality: dict[int, int] = field(default_factory=dict)
    coarse: dict[int, str] = field(default_factory=dict)
    listwise: dict[int, str] = field(default_factory=dict)
    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    anchors_seen: set[tuple[str, ...]] = field(default_factory=set)

    def answer(self, messages):
        prompt = messages[0]["content"]
        if "\n\nCANDIDATES\n" in prompt:
            ids = tuple(int(i) for i in re.findall(r"^\[R(\d+)\]$", prompt, re.MULTILINE))
            assert ids == tuple(int(i) for i in re.findall(r"^answer (\d+)$", prompt, re.MULTILINE))
            kind, verdict = "fine", {"order": sorted(ids, key=self.quality.get)}
            fate = self.listwise.get(self.position.get(ids[0], 0), FINE)
        else:
            (i,) = map(int, re.findall(r"^CANDIDATE\nanswer (\d+)$", prompt, re.MULTILINE))
            anchors = prompt.partition("ORDERED ANCHORS (worst to best)\n")[2].partition("\n\nCANDIDATE\n")[0]
            self.anchors_seen.add(tuple(anchors.split()))
            kind, ids, verdict, fate = "insert", (i,), {"position": self.position[i]}, self.coarse.get(i, FINE)
        if len(messages) == 1:
            self.asked.append((kind, ids))
        if fate == DOWN:
            return unreachable(messages)
        if fate == MALFORMED or (fate == LATE and len(messages) == 1):
            return '{"position": -1, "order": []}'
        return json.dumps(verdict)


def rollouts_of(ids):
    return tuple(Rollout(i, f"answer {i}") for i in ids)


def group_of(G, empty=(), step=4, epoch=0):
    return RolloutGroup(QUERY, tuple(Rollout(i, "" if i in empty else f"answer {i}") for i in range(G)), step, epoch)


def buffer_of(K, visits=0):
    return AnchorBuffer(tuple(Anchor(f"initial-{i}", f"anchor{i}", "initial", 0) for i in range(K)), visits=visits)


def run_score(method, group, buffer, table):
    judge = scripted_judge(table.answer)
    return asyncio.run(method.score(group, buffer, judge)), judge


# The oracles: every rollout is compared with every other, on exact fractions.


def slow_keys(table, ids, fine):
    """What a placed rollout is compared by: its position, then its quality where somebody ranked its interval."""
    placed = [i for i in ids if table.coarse.get(i, FINE) in (FINE, LATE)]
    keys = {}
    for i in placed:
        p = table.position[i]
        ranked = fine and table.listwise.get(p, FINE) in (FINE, LATE)
        keys[i] = (p, table.quality[i] if ranked else 0)
    return keys


def slow_tiers(keys):
    return [{i for i in keys if keys[i] == key} for key in sorted(set(keys.values()))]


def slow_sigma(keys, K):
    """Intervals with ties in the order of ids, which is the order of sampling."""
    return tuple(
        tuple(Rollout(i, f"answer {i}") for i in sorted(keys, key=lambda i: (keys[i], i)) if keys[i][0] == p)
        for p in range(K + 1)
    )


def slow_rewards(keys, G, empty):
    """A reward from the paper's formula; ties average; empties lie below everything and get -1."""
    everyone = {**keys, **dict.fromkeys(empty, (-1, 0))}
    n = len(everyone)
    rewards = []
    for i in range(G):
        if i in empty:
            rewards.append(-1.0)
        elif i not in keys:
            rewards.append(None)
        elif n == 1:
            rewards.append(0.0)
        else:
            worse = sum(everyone[j] < everyone[i] for j in everyone)
            equal = sum(everyone[j] == everyone[i] for j in everyone if j != i)
            rewards.append(float(-1 + 2 * (worse + Fraction(equal, 2)) / (n - 1)))
    return tuple(rewards)


def same(rewards, expected):
    assert [r is None for r in rewards] == [e is None for e in expected]
    assert [r for r in rewards if r is not None] == pytest.approx([e for e in expected if e is not None], abs=1e-12)


def slow_crowds(keys):
    """Positions that hold two rollouts or more."""
    return {p for p, count in Counter(p for p, _ in keys.values()).items() if count >= 2}


def slow_failures(table, crowds):
    return {p for p in crowds if table.listwise.get(p, FINE) in (MALFORMED, DOWN)}


# Random worlds.

FATES = st.sampled_from([FINE] * 6 + [LATE, MALFORMED, DOWN])


@st.composite
def worlds(draw):
    """(number of anchors, group size, ids without an answer, table)."""
    K, G = draw(st.integers(2, 6)), draw(st.integers(1, 10))
    ids = range(G)
    used = draw(st.lists(st.integers(0, K), min_size=1, max_size=4))
    fates = FATES if draw(st.booleans()) else st.just(FINE)
    table = Table(
        position={i: draw(st.sampled_from(used)) for i in ids},
        quality=dict(enumerate(draw(st.permutations(ids)))),
        coarse={i: draw(fates) for i in ids},
        listwise={p: draw(fates) for p in range(K + 1)},
    )
    return K, G, draw(st.frozensets(st.sampled_from(ids), max_size=G) | st.just(frozenset())), table


def all_fail(fate):
    """A group of three of whom nobody is placed."""
    table = Table(position=dict.fromkeys(range(3), 1), coarse=dict.fromkeys(range(3), fate))
    return 3, 3, frozenset(), table


def crowd_fails(fate):
    """A group of five, four of them in an interval that nobody could rank."""
    ids = range(5)
    position, quality = dict.fromkeys(ids, 1) | {4: 4}, dict.fromkeys(ids, 0)
    return 4, 5, frozenset(), Table(position, quality, dict.fromkeys(ids, FINE), dict.fromkeys(ids, fate))


@given(worlds(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(1, 3), st.integers(2, 4))
@example(all_fail(MALFORMED), True, True, False, 1, 1, 2)
@example(crowd_fails(MALFORMED), True, True, False, 1, 3, 3)
@example(crowd_fails(DOWN), True, True, False, 1, 3, 3)
def test_coarse_to_fine_and_score_equal_the_oracle(world, fine, anchor_content, bootstrap, epoch, H, refine_at):
    """With `bootstrap`, a query that has a buffer is ranked like any other."""
    K, G, empty, table = world
    group, before = group_of(G, empty, step=17, epoch=epoch), buffer_of(K, visits=epoch)
    judge = scripted_judge(table.answer)
    ranking = asyncio.run(coarse_to_fine(QUERY, before, group.answered, judge, fine, anchor_content))

    keys = slow_keys(table, [r.id for r in group.answered], fine)
    crowds = slow_crowds(keys)
    failed = slow_failures(table, crowds) if fine else set()
    assert ranking.positions == {i: p for i, (p, _) in keys.items()}
    assert ranking.sigma == slow_sigma(keys, K)
    assert [set(tier) for tier in ranking.order] == slow_tiers(keys)
    assert sorted(i for tier in ranking.order for i in tier) == sorted(keys)
    assert ranking.failed == failed
    assert ranking.tied == (failed if fine else crowds)

    expected = [("insert", (r.id,)) for r in group.answered]
    expected += [("fine", tuple(i for i in sorted(keys) if keys[i][0] == p)) for p in crowds if fine]
    assert sorted(table.asked) == sorted(expected), "one question per answer and one per crowded interval"
    names = [f"[A{k}]" for k in range(K)]
    shown = [piece for k in range(K) for piece in (names[k], f"anchor{k}")] if anchor_content else names
    assert table.anchors_seen == ({tuple(shown)} if group.answered else set())

    kinds = {"insert": "insert" if anchor_content else "order_only", "fine": "fine"}
    assert Counter(call.kind for call in judge.calls) == Counter(kinds[kind] for kind, _ in expected)
    fates = [table.coarse[r.id] for r in group.answered] + [table.listwise[p] for p in crowds if fine]
    outcomes = {FINE: ("parsed", 1), LATE: ("parsed", 2), MALFORMED: ("malformed", 3), DOWN: ("unreachable", 1)}
    assert Counter((call.outcome, call.attempts) for call in judge.calls) == Counter(outcomes[fate] for fate in fates)

    method = RankBuffer(
        fine=fine, anchor_content=anchor_content, bootstrap=bootstrap, prune_after=H, refine_at=refine_at
    )
    score, judge = run_score(method, group, before, table)
    same(score.rewards, slow_rewards(keys, G, empty))
    assert (score.order, score.positions, score.before) == (ranking.order, ranking.positions, before)
    assert score.fine_ranked == bool(crowds)
    after = before.update(slow_sigma(keys, K), epoch, 17, H, refine_at, failed) if keys else before
    assert score.after == after.visited(), "a visit at which nobody was placed changes no anchor"
    assert len(judge.calls) == len(expected)


@given(st.lists(st.none() | st.just(-1) | st.integers(0, 5), min_size=1, max_size=12))
def test_rank_rewards_equal_the_oracle(places):
    """A place is a tier; `None` is unscored and -1 is empty."""
    empty = [i for i, place in enumerate(places) if place == -1]
    keys = {i: (place, 0) for i, place in enumerate(places) if place is not None and place >= 0}
    order = [sorted(tier) for tier in slow_tiers(keys)]
    rewards = rank_rewards(order, len(places), empty)
    same(rewards, slow_rewards(keys, len(places), empty))


def test_insertion_bin_is_an_end_or_a_quarter_of_the_buffer():
    below, one, two, three, four, above = INSERTION_BINS
    assert [insertion_bin(p, 2) for p in range(3)] == [below, one, above]
    assert [insertion_bin(p, 5) for p in range(6)] == [below, one, two, three, four, above]
    assert [insertion_bin(p, 7) for p in range(8)] == [below, one, one, two, three, three, four, above]


# First visits and epochs.


def test_score_takes_the_first_anchors_from_the_data():
    for k0, chosen in ((4, (0, 2, 4, 6)), (7, range(7))):
        score, _ = run_score(RankBuffer(k0=k0), group_of(1), None, Table(position={0: 1}))
        assert score.before == initial_buffer(QUERY.responses, k0)
        assert [anchor.text for anchor in score.before.anchors] == [f"reference {i}" for i in chosen]
        assert score.after.visits == 1


@given(
    st.permutations(range(8)), st.frozensets(st.integers(0, 7)), st.integers(2, 7), st.sampled_from([FINE, FINE, DOWN])
)
@example(range(8), frozenset(range(7)), 4, FINE)
@example(range(8), frozenset(range(8)), 4, FINE)
@example(range(8), frozenset(range(5)), 4, FINE)
@example(range(8), frozenset(), 4, DOWN)
def test_bootstrap_takes_rewards_and_anchors_from_one_ranking(ranks, empty, k0, fate):
    """With fewer than two answers there is nothing to rank, and the query waits for its next visit."""
    quality = dict(enumerate(ranks))
    table = Table(quality=quality, listwise={0: fate})
    score, judge = run_score(RankBuffer(k0=k0, bootstrap=True), group_of(8, empty, step=6, epoch=1), None, table)
    valid = [i for i in range(8) if i not in empty]
    asked = len(valid) >= 2
    assert table.asked == ([("fine", tuple(valid))] if asked else [])
    assert [call.kind for call in judge.calls] == ["bootstrap"] * asked
    assert (score.before, score.positions) == (None, {})
    if asked and fate == DOWN:
        assert score.rewards == tuple(-1 if i in empty else None for i in range(8))
        assert (score.order, score.after, score.fine_ranked) == ((), None, False)
        return
    same(score.rewards, slow_rewards({i: (0, quality[i]) for i in valid}, 8, empty))
    worst_to_best = sorted(valid, key=quality.get)
    assert score.order == tuple((i,) for i in worst_to_best)
    assert score.fine_ranked == asked
    assert score.after == (bootstrap_buffer(rollouts_of(worst_to_best), k0, 1, 6).visited() if asked else None)


def visit(method, buffer, step, epoch):
    """Score a group of two, one below and one above all anchors."""
    table = Table(position={0: 0, 1: len(buffer)}, quality={0: 0, 1: 1})
    score, _ = run_score(method, group_of(2, step=step, epoch=epoch), buffer, table)
    assert score.rewards == (-1, 1)
    return score.after


def test_static_buffers_move_in_epoch_0_and_freeze_from_epoch_1():
    first = visit(RankBuffer(static=True), buffer_of(2), 0, epoch=0)
    assert len(first) == 4
    for epoch in (1, 2, 3):
        assert visit(RankBuffer(static=True), first, 9, epoch) == first.visited()


def test_dynamic_buffers_move_in_every_epoch_once_and_count_every_visit():
    buffer = buffer_of(2)
    for step in range(6):
        buffer = visit(RankBuffer(), buffer, step, epoch=step // 2)
        assert len(buffer) == 4 + 2 * (step // 2)
        assert buffer.visits == step + 1
