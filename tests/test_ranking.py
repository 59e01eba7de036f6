"""Coarse-to-fine ranking, rank rewards and a group's score, against slow oracles and a judge that follows a table."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from conftest import scripted_judge, unreachable
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, bootstrap_buffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.ranking import coarse_to_fine, rank_rewards
from rankbuffer_trl.rewards.rankbuffer import RankBuffer

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


# Random worlds.

FATES = st.sampled_from([FINE] * 6 + [LATE, MALFORMED, DOWN])


@st.composite
def worlds(draw, failures=True):
    """(number of anchors, group size, ids without an answer, table)."""
    K, G = draw(st.integers(2, 6)), draw(st.integers(1, 10))
    ids = range(G)
    used = draw(st.lists(st.integers(0, K), min_size=1, max_size=4))
    fates = FATES if failures and draw(st.booleans()) else st.just(FINE)
    table = Table(
        position={i: draw(st.sampled_from(used)) for i in ids},
        quality=dict(enumerate(draw(st.permutations(ids)))),
        coarse={i: draw(fates) for i in ids},
        listwise={p: draw(fates) for p in range(K + 1)},
    )
    return K, G, draw(st.frozensets(st.sampled_from(ids), max_size=G) | st.just(frozenset())), table


@settings(max_examples=300)
@given(worlds(), st.booleans(), st.booleans())
def test_ranking_equals_the_oracle(world, fine, anchor_content):
    K, G, empty, table = world
    rollouts = rollouts_of(i for i in range(G) if i not in empty)
    judge = scripted_judge(table.answer)
    ranking = asyncio.run(coarse_to_fine(QUERY, buffer_of(K), rollouts, judge, fine, anchor_content))

    keys = slow_keys(table, [r.id for r in rollouts], fine)
    crowds = slow_crowds(keys)
    failed = {p for p in crowds if fine and table.listwise[p] in (MALFORMED, DOWN)}
    assert ranking.positions == {i: p for i, (p, _) in keys.items()}
    assert ranking.sigma == slow_sigma(keys, K)
    assert [set(tier) for tier in ranking.order] == slow_tiers(keys)
    assert sorted(i for tier in ranking.order for i in tier) == sorted(keys)
    assert ranking.failed == failed
    assert ranking.tied == (failed if fine else crowds)

    expected = [("insert", (r.id,)) for r in rollouts]
    expected += [("fine", tuple(i for i in sorted(keys) if keys[i][0] == p)) for p in crowds if fine]
    assert sorted(table.asked) == sorted(expected), "one question per answer and one per crowded interval"
    names = [f"[A{k}]" for k in range(K)]
    shown = [piece for k in range(K) for piece in (names[k], f"anchor{k}")] if anchor_content else names
    assert table.anchors_seen == ({tuple(shown)} if rollouts else set())

    calls = judge.drain()
    kinds = {"insert": "insert" if anchor_content else "order_only", "fine": "fine"}
    assert Counter(call.kind for call in calls) == Counter(kinds[kind] for kind, _ in expected)
    fates = [table.coarse[r.id] for r in rollouts] + [table.listwise[p] for p in crowds if fine]
    outcomes = {FINE: ("parsed", 1), LATE: ("parsed", 2), MALFORMED: ("malformed", 3), DOWN: ("unreachable", 1)}
    assert Counter((call.outcome, call.attempts) for call in calls) == Counter(outcomes[fate] for fate in fates)


@settings(max_examples=300)
@given(worlds(), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(1, 3), st.integers(2, 4))
def test_score_equals_the_oracle(world, fine, anchor_content, epoch, H, refine_at):
    K, G, empty, table = world
    method = RankBuffer(fine=fine, anchor_content=anchor_content, prune_after=H, refine_at=refine_at)
    before = buffer_of(K, visits=epoch)
    group = group_of(G, empty, step=17, epoch=epoch)
    score, judge = run_score(method, group, before, table)

    keys = slow_keys(table, [i for i in range(G) if i not in empty], fine)
    crowds = slow_crowds(keys)
    failed = {p for p in crowds if fine and table.listwise[p] in (MALFORMED, DOWN)}
    same(score.rewards, slow_rewards(keys, G, empty))
    assert all(-1 <= reward <= 1 for reward in score.rewards if reward is not None)
    assert [set(tier) for tier in score.order] == slow_tiers(keys)
    assert score.positions == {i: p for i, (p, _) in keys.items()}
    assert score.fine_ranked == bool(crowds)
    assert score.before == before
    after = before.update(slow_sigma(keys, K), epoch, 17, H, refine_at, failed) if keys else before
    assert score.after == after.visited()
    assert len(judge.calls) == G - len(empty) + (len(crowds) if fine else 0)


@given(worlds(failures=False))
def test_without_ties_and_failures_rewards_are_the_evenly_spaced_levels(world):
    K, G, _, table = world
    score, _ = run_score(RankBuffer(), group_of(G), buffer_of(K), table)
    levels = [-1 + 2 * q / (G - 1) for q in range(G)] if G > 1 else [0.0]
    assert sorted(score.rewards) == levels
    by_reward = sorted(range(G), key=lambda i: score.rewards[i])
    assert by_reward == sorted(range(G), key=lambda i: (table.position[i], table.quality[i]))


@settings(max_examples=300)
@given(st.lists(st.none() | st.just(-1) | st.integers(0, 5), min_size=1, max_size=12))
def test_rank_rewards_equal_the_oracle(places):
    """A place is a tier; `None` is unscored and -1 is empty."""
    empty = [i for i, place in enumerate(places) if place == -1]
    keys = {i: (place, 0) for i, place in enumerate(places) if place is not None and place >= 0}
    order = [sorted(tier) for tier in slow_tiers(keys)]
    rewards = rank_rewards(order, len(places), empty)
    same(rewards, slow_rewards(keys, len(places), empty))
    assert all(-1 <= reward <= 1 for reward in rewards if reward is not None)
    if len(keys) > 1 and not empty:
        assert sum(reward for reward in rewards if reward is not None) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("order", "G", "empty", "rewards"),
    [
        ([(2,), (0,), (1,)], 3, (), (0, 1, -1)),
        ([(2,), (0, 1)], 3, (), (0.5, 0.5, -1)),
        ([(0, 1, 2)], 3, (), (0, 0, 0)),
        ([(0,), (1,)], 5, (2, 3, 4), (0.5, 1, -1, -1, -1)),
        ([(1, 0)], 3, (2,), (0.5, 0.5, -1)),
        ([(3,), (1,)], 4, (), (None, 1, None, -1)),
        ([(3,)], 4, (0,), (-1, None, None, 1)),
        ([(1,)], 3, (), (None, 0, None)),
        ([(0,)], 1, (), (0,)),
        ([], 3, (0, 1, 2), (-1, -1, -1)),
        ([], 2, (), (None, None)),
    ],
)
def test_rewards_worked_by_hand(order, G, empty, rewards):
    assert rank_rewards(order, G, empty) == rewards


# What the judge sees and how its failures show.


def test_answers_of_one_interval_are_ranked_together_and_a_lone_one_is_not():
    table = Table(position={0: 1, 1: 0, 2: 1, 3: 2}, quality={0: 9, 1: 3, 2: 4, 3: 1})
    score, _ = run_score(RankBuffer(), group_of(4), buffer_of(2), table)
    assert [ids for kind, ids in table.asked if kind == "fine"] == [(0, 2)]
    assert score.order == ((1,), (2,), (0,), (3,))
    same(score.rewards, (1 / 3, -1, -1 / 3, 1))


@pytest.mark.parametrize("fate", [MALFORMED, DOWN])
def test_an_unplaced_rollout_is_unscored_and_touches_no_buffer(fate):
    table = Table(position={0: 0, 1: 0, 2: 2}, quality={0: 1, 1: 0, 2: 2}, coarse={1: fate})
    score, _ = run_score(RankBuffer(), group_of(3), buffer_of(2), table)
    assert score.rewards == (-1, None, 1)
    assert 1 not in score.positions
    assert [anchor.text for anchor in score.after.anchors] == ["answer 0", "anchor0", "anchor1", "answer 2"]
    assert not score.fine_ranked


@pytest.mark.parametrize("fate", [MALFORMED, DOWN])
def test_a_failed_fine_ranking_shares_ranks_adds_no_anchor_and_counts_as_activity(fate):
    before = AnchorBuffer(
        tuple(Anchor(name, name, "initial", 0, h) for name, h in zip("ABCD", (0, 2, 2, 0), strict=True))
    )
    table = Table(position=dict.fromkeys(range(4), 1) | {4: 4}, quality=dict(enumerate(range(5))), listwise={1: fate})
    score, _ = run_score(RankBuffer(), group_of(5), before, table)
    assert score.order == ((0, 1, 2, 3), (4,))
    assert score.rewards == (-0.25, -0.25, -0.25, -0.25, 1)
    assert score.fine_ranked
    assert [(anchor.text, anchor.h) for anchor in score.after.anchors] == [
        ("A", 0),
        ("B", 0),
        ("D", 0),
        ("answer 4", 0),
    ]


@pytest.mark.parametrize("fate", [MALFORMED, DOWN])
def test_a_group_in_which_nothing_was_placed_changes_no_anchor(fate):
    before = AnchorBuffer(tuple(Anchor(name, name, "initial", 0, 2) for name in "ABC"), visits=5)
    table = Table(position={0: 0, 1: 1}, coarse={0: fate, 1: fate})
    score, _ = run_score(RankBuffer(), group_of(2, epoch=5), before, table)
    assert score.rewards == (None, None)
    assert (score.order, score.positions, score.fine_ranked) == ((), {}, False)
    assert score.after == before.visited()


def test_a_group_of_empties_asks_nothing_and_changes_no_anchor():
    before = AnchorBuffer(tuple(Anchor(name, name, "initial", 0, 2) for name in "ABC"), visits=5)
    score, judge = run_score(RankBuffer(), group_of(3, empty=(0, 1, 2), epoch=5), before, Table())
    assert score.rewards == (-1, -1, -1)
    assert score.after == before.visited()
    assert judge.calls == []


def test_empties_share_the_bottom_and_are_never_judged():
    table = Table(position={1: 0, 3: 2}, quality={1: 0, 3: 1})
    score, _ = run_score(RankBuffer(), group_of(4, empty=(0, 2)), buffer_of(2), table)
    same(score.rewards, (-1, 1 / 3, -1, 1))
    assert sorted(table.asked) == [("insert", (1,)), ("insert", (3,))]


def test_without_fine_ranking_nobody_ranks_and_an_interval_ties():
    table = Table(position={0: 1, 1: 1, 2: 1, 3: 0}, quality={0: 3, 1: 2, 2: 1, 3: 0})
    score, judge = run_score(RankBuffer(fine=False), group_of(4), buffer_of(2), table)
    assert {call.kind for call in judge.calls} == {"insert"}
    assert score.order == ((3,), (0, 1, 2))
    same(score.rewards, (1 / 3, 1 / 3, 1 / 3, -1))
    assert score.fine_ranked
    assert [anchor.text for anchor in score.after.anchors] == ["answer 3", "anchor0", "answer 1", "anchor1"]


def test_order_only_hides_the_anchors_from_the_coarse_judge():
    table = Table(position={0: 0})
    run_score(RankBuffer(anchor_content=False), group_of(1), buffer_of(3), table)
    assert table.anchors_seen == {("[A0]", "[A1]", "[A2]")}


def test_the_first_visit_takes_its_anchors_from_the_data():
    table = Table(position={0: 0, 1: 4}, quality={0: 0, 1: 1})
    score, _ = run_score(RankBuffer(), group_of(2), None, table)
    assert score.before == initial_buffer(QUERY.responses, 4)
    assert [anchor.text for anchor in score.after.anchors] == [
        "answer 0",
        *(f"reference {i}" for i in (0, 2, 4, 6)),
        "answer 1",
    ]
    assert score.after.visits == 1


def test_k0_sets_the_number_of_first_anchors():
    score, _ = run_score(RankBuffer(k0=7), group_of(1), None, Table(position={0: 3}))
    assert [anchor.text for anchor in score.before.anchors] == list(QUERY.responses)


# Bootstrap.

RANKS = dict(enumerate((4, 2, 7, 0, 6, 1, 5, 3)))  # quality of rollouts 0..7


def test_bootstrap_takes_rewards_and_anchors_from_one_ranking_without_maintenance():
    table = Table(quality=RANKS)
    score, judge = run_score(RankBuffer(bootstrap=True), group_of(8, step=6, epoch=1), None, table)
    assert table.asked == [("fine", tuple(range(8)))]
    assert [(call.kind, call.outcome) for call in judge.calls] == [("bootstrap", "parsed")]
    same(score.rewards, [-1 + 2 * RANKS[i] / 7 for i in range(8)])
    worst_to_best = sorted(RANKS, key=RANKS.get)
    assert score.order == tuple((i,) for i in worst_to_best)
    assert score.before is None
    assert score.positions == {}
    assert score.fine_ranked
    chosen = [worst_to_best[position - 1] for position in (1, 3, 6, 8)]
    assert score.after == AnchorBuffer(
        tuple(Anchor(f"6-{i}", f"answer {i}", "bootstrap", 1, 0) for i in chosen), visits=1
    )


@settings(max_examples=100)
@given(st.permutations(range(8)), st.frozensets(st.integers(0, 7)), st.integers(2, 7))
def test_bootstrap_equals_the_oracle(ranks, empty, k0):
    quality = dict(enumerate(ranks))
    table = Table(quality=quality)
    score, _ = run_score(RankBuffer(k0=k0, bootstrap=True), group_of(8, empty, step=2), None, table)
    valid = [i for i in range(8) if i not in empty]
    same(score.rewards, slow_rewards({i: (0, quality[i]) for i in valid}, 8, empty))
    assert table.asked == ([("fine", tuple(valid))] if len(valid) >= 2 else [])
    if len(valid) >= 2:
        sigma = rollouts_of(sorted(valid, key=quality.get))
        assert score.after == bootstrap_buffer(sigma, k0, 0, 2).visited()
        assert len(score.after) == min(k0, len(valid))
    else:
        assert score.after is None


def test_bootstrap_with_fewer_answers_than_k0_takes_all():
    score, _ = run_score(RankBuffer(bootstrap=True), group_of(5, empty=(0, 3)), None, Table(quality=RANKS))
    assert [anchor.text for anchor in score.after.anchors] == ["answer 1", "answer 4", "answer 2"]
    assert score.rewards == (-1, 0, 1, -1, 0.5)


def test_bootstrap_with_one_answer_waits_for_the_next_visit():
    score, judge = run_score(RankBuffer(bootstrap=True), group_of(4, empty=(0, 1, 3)), None, Table())
    assert score.rewards == (-1, -1, 1, -1)
    assert (score.order, score.before, score.after) == (((2,),), None, None)
    assert judge.calls == []


def test_bootstrap_without_any_answer_waits_for_the_next_visit():
    score, judge = run_score(RankBuffer(bootstrap=True), group_of(3, empty=(0, 1, 2)), None, Table())
    assert (score.rewards, score.after, judge.calls) == ((-1, -1, -1), None, [])


@pytest.mark.parametrize("fate", [MALFORMED, DOWN])
def test_a_failed_bootstrap_scores_nobody_and_leaves_no_buffer(fate):
    table = Table(quality=RANKS, listwise={0: fate})
    score, judge = run_score(RankBuffer(bootstrap=True), group_of(4, empty=(1,)), None, table)
    assert score.rewards == (None,) * 4
    assert (score.order, score.before, score.after, score.fine_ranked) == ((), None, None, False)
    assert [call.outcome for call in judge.calls] == [fate]


def test_bootstrap_ranks_coarsely_once_it_has_a_buffer():
    table = Table(position={0: 0, 1: 2}, quality=RANKS)
    score, _ = run_score(RankBuffer(bootstrap=True), group_of(2), buffer_of(2), table)
    assert {kind for kind, _ in table.asked} == {"insert"}
    assert len(score.after) == 4


# Epochs.


def visit(method, buffer, step, epoch):
    """A group of two, one below and one above all anchors."""
    table = Table(position={0: 0, 1: len(buffer)}, quality={0: 0, 1: 1})
    return run_score(method, group_of(2, step=step, epoch=epoch), buffer, table)[0].after


@pytest.mark.parametrize("last", [1, 2, 3])
def test_static_buffers_move_in_epoch_0_and_freeze_from_epoch_1(last):
    method = RankBuffer(static=True)
    first = visit(method, buffer_of(2), 0, epoch=0)
    assert len(first) == 4
    later = visit(method, first, 9, epoch=last)
    assert later == first.visited()
    assert later.visits == 2


def test_static_scores_a_frozen_group_like_any_other():
    table = Table(position={0: 2, 1: 0}, quality={0: 0, 1: 1})
    score, _ = run_score(RankBuffer(static=True), group_of(2, epoch=1), buffer_of(2), table)
    assert score.rewards == (1, -1)


def test_dynamic_buffers_move_in_every_epoch():
    buffer = buffer_of(2)
    for epoch in range(3):
        buffer = visit(RankBuffer(), buffer, epoch, epoch)
        assert len(buffer) == 4 + 2 * epoch
        assert buffer.visits == epoch + 1


def test_two_visits_of_one_epoch_expand_once_but_both_count():
    buffer = visit(RankBuffer(), visit(RankBuffer(), buffer_of(2), 0, epoch=0), 1, epoch=0)
    assert len(buffer) == 4
    assert buffer.visits == 2
