"""Methods that let responses meet: tournaments against slow oracles, and who is shown first."""

import hashlib
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from unittest.mock import patch

import pytest
from helpers.quality import CASES, EIGHT, QUALITIES, RIGHT
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.rewards._arenarl import ArenaRL
from rankbuffer_trl.rewards._matches import make_match
from rankbuffer_trl.rewards._pairwise_rank import PairwiseRank
from rankbuffer_trl.rewards._prefetch import first_questions
from rankbuffer_trl.rewards._rrc_agr import RRCAGR
from rankbuffer_trl.rewards._rrc_scr import RRCSCR
from rankbuffer_trl.rewards._tournament import Tournament
from rankbuffer_trl.testing import QUERY, RESPONSE_LINES, fails, faulty, make, play, quality, truth

PAIRED = (RRCSCR(), RRCAGR(), PairwiseRank(), Tournament())
paired = pytest.mark.parametrize("method", PAIRED, ids=str)


# Tournament


def tournament(group: RolloutGroup, played, matches, case, repeats: int = 3) -> Counter:
    """Points won in the matches that were asked for, by rollout heard about; they must be those of knockouts."""
    texts = {rollout.id: rollout.text for rollout in group.rollouts}
    read = [tuple(re.findall(r"^\[[AB]\]\n(.*)$", prompt, re.MULTILINE)) for prompt in played.prompts]
    assert read == [tuple(texts[i] for i in match) for match in matches]
    matches = iter(matches)
    points = Counter()
    left = [set(texts) if group.answered else set() for _ in range(repeats)]
    while any(len(candidates) > 1 for candidates in left):
        for candidates in left:
            pairs = [next(matches) for _ in range(len(candidates) // 2)]
            drawn = [i for pair in pairs for i in pair]
            assert len(set(drawn)) == len(drawn) and set(drawn) <= candidates, "each plays once in a round"
            for first, second in pairs:
                level = {i: quality(texts[i]) if texts[i] else -1 for i in (first, second)}
                best = first if level[first] >= level[second] else second
                if fails(case, "Is high.", *sorted(filter(None, (texts[first], texts[second])))):
                    best = first
                else:
                    points.update({first: 0, second: 0})
                    points[best] += 1
                candidates.remove(first if best == second else second)
    assert next(matches, None) is None
    return points


@given(QUALITIES, CASES, st.integers(0, 3))
@example(list(EIGHT), RIGHT, 0)
@example([4] * 8, RIGHT, 0)
@example([*EIGHT[2:], None, None], RIGHT, 0)
@example([None] * 8, RIGHT, 0)
@example([3, None], RIGHT, 0)
def test_tournament_counts_matches_won(qualities, case, seed):
    group, matches = make(qualities), []

    def kept(*arguments, **options):
        matches.append(make_match(*arguments, **options))
        return matches[-1]

    with patch("rankbuffer_trl.rewards._tournament.make_match", kept):
        played = play(Tournament(seed), group, faulty(case))
    points = tournament(group, played, [match.shown for match in matches], case)
    if len(qualities) == 1:
        points[0] = 0
    for rollout in group.rollouts:
        if not rollout.text:
            assert played.rewards[rollout.id] == -1
        elif rollout.id not in points:
            assert played.rewards[rollout.id] is None
        elif max(points.values()) == min(points.values()):
            assert played.rewards[rollout.id] == 0
        else:
            share = (points[rollout.id] - min(points.values())) / (max(points.values()) - min(points.values()))
            assert played.rewards[rollout.id] == pytest.approx(2 * share - 1)


def test_tournament_is_drawn_anew_for_each_repeat_round_and_group():
    def drawn(prompts):
        return [frozenset(RESPONSE_LINES.findall(prompt)) for prompt in prompts]

    met = Counter()
    for step in range(100):
        pairs = drawn(play(Tournament(), make(range(8), step=step)).prompts)
        assert len({frozenset(pairs[i : i + 4]) for i in (0, 4, 8)}) > 1, "not the same first round three times"
        met.update(pairs[:12])
    assert len(met) == 28, "everyone meets everyone"
    assert all(20 <= count <= 70 for count in met.values()), "1,200 matches over 28 pairs: 43 each"


# ArenaRL


def guess(a: str, b: str, shown_first: str) -> int:
    """What an unreliable judge gives to `a` against `b`: few levels, so that there are ties."""
    return random.Random(f"{a} {b} {shown_first}").randrange(4)


def unreliable(prompt: str) -> str:
    if '{"scores"' not in prompt:
        return truth(prompt)
    a, b = RESPONSE_LINES.findall(prompt)
    return json.dumps({"scores": [guess(a, b, a), guess(b, a, a)]})


def arena(group: RolloutGroup, case, points) -> list[tuple[int, ...]]:
    """The final order as tiers, worst to best: one recursion over the bracket. `points` is what a judge gives."""
    texts = {r.id: r.text for r in group.answered}
    ids, heard = list(texts), {i: [] for i in texts}

    def meet(a, b):
        means = {}
        for i, other in ((a, b), (b, a)):
            orders = [(x, y) for x, y in ((a, b), (b, a)) if not fails(case, "Is high.", texts[x], texts[y])]
            given = [points(texts[i], texts[other], texts[x]) for x, _ in orders]
            if given:
                means[i] = Fraction(sum(given), len(given))
                heard[i].append(means[i])
        return means

    def mean(i):
        return sum(heard[i]) / len(heard[i]) if heard[i] else Fraction(-1)

    for other in ids[1:]:
        meet(ids[0], other)
    seeds = sorted(ids, key=lambda i: (-mean(i), ids.index(i)))
    rounds = max(len(seeds) - 1, 0).bit_length()
    lost = [[] for _ in range(rounds)]

    def champion(players, depth):
        """Of players by seed, `None` where there is none: the outer ones of four against the inner ones."""
        if len(players) == 1:
            return players[0]
        halves = [[p for k, p in enumerate(players) if (k % 4 in (0, 3)) == outer] for outer in (True, False)]
        a, b = sorted((champion(half, depth + 1) for half in halves), key=[*seeds, None].index)
        if b is None:
            return a
        means = meet(a, b)
        winner, loser = (b, a) if means.get(b, 0) > means.get(a, 0) else (a, b)
        lost[depth].append(loser)
        return winner

    if not seeds:
        return []
    best = champion(seeds + [None] * (2**rounds - len(seeds)), 0)
    tiers = []
    for losers in reversed(lost):  # those of the first round are the worst
        for level in sorted({mean(i) for i in losers}):
            tiers.append(tuple(i for i in losers if mean(i) == level))
    tiers.append((best,))
    return [tier for tier in (tuple(i for i in tier if heard[i] or len(ids) == 1) for tier in tiers) if tier]


def absolute(text: str, other: str, shown_first: str) -> int:
    return quality(text)


@pytest.mark.parametrize(("answer", "points"), [(truth, absolute), (unreliable, guess)])
@given(QUALITIES, CASES)
@example(list(EIGHT), RIGHT)
@example([4] * 8, RIGHT)
@example([4] * 8, (0, 1.0))
def test_arena_is_a_seeded_single_elimination(answer, points, qualities, case):
    group = make(qualities)
    tiers = arena(group, case, points)
    played = play(ArenaRL(), group, faulty(case, answer))
    assert [set(tier) for tier in played.score.order] == [set(tier) for tier in tiers]
    below, n = len(group.empty), len(group.empty) + sum(map(len, tiers))
    for tier in tiers:
        place = below + (len(tier) - 1) / 2
        expected = -1 + 2 * place / (n - 1) if n > 1 else 0
        assert all(played.rewards[i] == pytest.approx(expected) for i in tier)
        below += len(tier)


def test_arena_judges_each_match_in_both_orders():
    prompts = play(ArenaRL(), make(EIGHT)).prompts
    shown = [tuple(RESPONSE_LINES.findall(prompt)) for prompt in prompts]
    assert [pair[::-1] for pair in shown[::2]] == shown[1::2]
    assert shown[:14:2] == [("5.r0", f"{q}.r{i}") for i, q in enumerate(EIGHT)][1:], "the first meets each other one"
    assert [set(pair) for pair in shown[14:22:2]] == [
        {"10.r4", "0.r1"}, {"6.r7", "5.r0"}, {"9.r2", "2.r3"}, {"8.r6", "3.r5"}
    ], "1-8, 4-5, 2-7, 3-6"  # fmt: skip
    assert [set(pair) for pair in shown[22::2]] == [{"10.r4", "6.r7"}, {"9.r2", "8.r6"}, {"10.r4", "9.r2"}]


# In which order candidates are shown


def shown_pairs(method, group: RolloutGroup) -> list[tuple[str, str]]:
    return [tuple(RESPONSE_LINES.findall(question.prompt())) for question in first_questions(method, group)]


@paired
def test_order_of_presentation_depends_on_seed_query_and_step_alone(method):
    group = make(EIGHT)
    pairs = shown_pairs(method, group)
    assert shown_pairs(replace(method), replace(group, epoch=3)) == pairs
    others = [
        shown_pairs(replace(method, seed=method.seed + 1), group),
        shown_pairs(method, make(EIGHT, step=1)),
        shown_pairs(method, make(EIGHT, replace(QUERY, id="r"))),
    ]
    assert len({tuple(pairs), *map(tuple, others)}) == 4
    if not isinstance(method, Tournament):
        assert all([set(pair) for pair in other] == [set(pair) for pair in pairs] for other in others)


@paired
def test_order_of_presentation_puts_each_side_first_about_half_the_time(method):
    first, seen = Counter(), Counter()
    for step in range(60):
        for a, b in shown_pairs(method, make(EIGHT, step=step)):
            first[a] += 1
            seen.update((a, b))
    for text, times in seen.items():
        assert abs(first[text] - times / 2) < 4 * math.sqrt(times / 4), "within four standard deviations"
    if isinstance(method, RRCAGR):
        references = sum(first[text] for text in QUERY.responses)
        assert abs(references / sum(first.values()) - 0.5) < 0.05


def test_order_of_presentation_is_the_same_in_every_process():
    """Python's own hashes of texts differ between processes. A change of these digests changes every run's prompts."""
    orders = {method.name: str(shown_pairs(method, make(EIGHT))).encode() for method in PAIRED}
    assert {name: hashlib.sha256(order).hexdigest()[:8] for name, order in orders.items()} == {
        "rrc_scr": "8b2f40c9",
        "rrc_agr": "9ecf1e2f",
        "pairwise_rank": "8b2f40c9",
        "tournament": "476f21a1",
    }
