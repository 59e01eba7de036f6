"""RankBuffer in one prompt: averaged ladders against a slow oracle, the paper's update, split groups, failures."""

import asyncio
import json
import math
import random
import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from conftest import scripted_judge
from helpers.places import mean, shown_in, slow_places, slow_rewards
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.rewards.beyond.looks import balanced
from rankbuffer_trl.rewards.beyond.rankbuffer_batch import RankBufferBatch, partition
from rankbuffer_trl.rewards.method import load_method
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.testing import QUERY, make, quality, truth

SEEDS = st.integers(0, 999)
LOOKS = st.sampled_from([1, 2, 4, 6])
GROUPS = st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=7)
BUFFERS = st.lists(st.integers(0, 10), min_size=2, max_size=6).map(sorted)


def buffer_of(qualities) -> AnchorBuffer:
    anchors = (Anchor(f"initial-{k}", f"{q}.a{k}", "initial", 0, h=k % 3) for k, q in enumerate(qualities))
    return AnchorBuffer(tuple(anchors), observed_epoch=0)


def visit(method, group: RolloutGroup, buffer: AnchorBuffer | None, answer=truth):
    """Score a group. Return the score, the calls, and the (prompt, answer) pairs in the order of asking."""
    heard = []

    def respond(messages):
        heard.append((messages[0]["content"], answer(messages[0]["content"])))
        return heard[-1][1]

    judge = scripted_judge(respond, max_attempts=1, guard=False)
    return asyncio.run(method.score(group, buffer, judge)), judge.calls, heard


def erring(seed: int, noise: float, failing: float = 0.0):
    """A judge that errs by up to `noise` on each candidate, places it among true anchors, and fails now and then."""
    chance = random.Random(seed)

    def answer(prompt: str):
        if chance.random() < failing:
            return TransportError("refused")
        looks = [quality(text) + noise * chance.random() for text in shown_in(prompt)]
        anchors = [quality(text) for text in shown_in(prompt, "A")]
        order = sorted(range(len(looks)), key=looks.__getitem__)
        positions = [sum(anchor < looks[slot] for anchor in anchors) for slot in order]
        return json.dumps({"order": order, "positions": positions})

    return answer


# The oracle: every look is a written-out ladder of texts, and their mean places are those of `slow_places`.


def ladder(prompt: str, answer: str) -> list[str]:
    """The merged order of anchors and candidates that an answer stands for."""
    verdict, candidates, anchors = json.loads(answer), shown_in(prompt), shown_in(prompt, "A")
    merged = []
    for p in range(len(anchors) + 1):
        pairs = zip(verdict["order"], verdict["positions"], strict=True)
        merged += [candidates[slot] for slot, position in pairs if position == p] + anchors[p : p + 1]
    return merged


def check(method, group, buffer, score, ladders: list[list[str]]) -> None:
    """Compare a score with the ladders of all looks, each of which holds all placed rollouts."""
    anchors = [anchor.text for anchor in buffer.anchors]
    texts = {r.id: r.text for r in group.answered if any(r.text in each for each in ladders)}
    if not texts:
        assert score.rewards == slow_rewards(group, {}, 0)
        assert (score.order, score.positions, score.after) == ((), {}, buffer.visited())
        return
    everyone = slow_places(ladders)
    assert all(everyone[a] < everyone[b] for a, b in pairwise(anchors)), "the anchors' mean places keep their order"
    positions = {i: sum(everyone[anchor] < everyone[text] for anchor in anchors) for i, text in texts.items()}
    assert score.positions == positions
    own = slow_places([[text for text in each if text not in anchors] for each in ladders])
    assert score.rewards == slow_rewards(group, own, len(texts) - 1)
    levels = sorted({own[text] for text in texts.values()})
    assert [set(tier) for tier in score.order] == [{i for i in texts if own[texts[i]] == q} for q in levels]
    sigma = [
        tuple(group.rollouts[i] for i in sorted(texts, key=lambda i: (everyone[texts[i]], i)) if positions[i] == p)
        for p in range(len(anchors) + 1)
    ]
    assert score.fine_ranked == any(len(rollouts) > 1 for rollouts in sigma)
    updated = buffer.update(
        sigma, group.known_epoch, group.step, H=method.prune_after, refine_at=method.refine_at
    ).visited()
    assert (score.before, score.after) == (buffer, updated), "the paper's update, given the same intervals"


@given(GROUPS, BUFFERS, LOOKS, SEEDS, st.sampled_from([0, 3, 20]))
@example([5], [1, 9], 2, 0, 0)
@example([None, 5], [1, 9], 2, 0, 0)
@example([4, 4, 4], [4, 4], 2, 0, 0)
@example([None] * 3, [1, 9], 2, 0, 0)
@example([3, 5, 8], [1, 9], 6, 0, 20)
@example([3, 5, 8], [1, 9], 6, 1, 20)
def test_score_and_buffer_are_those_of_the_written_out_ladders(qualities, anchors, looks, seed, noise):
    method = RankBufferBatch(looks=looks, seed=seed, refine_at=2, prune_after=2)
    group, buffer = replace(make(qualities, step=3), epoch=1), buffer_of(anchors)
    score, calls, heard = visit(method, group, buffer, erring(seed, noise))
    orders = balanced([rollout.id for rollout in group.answered], looks, seed, group) if group.answered else []
    assert [shown_in(prompt) for prompt, _ in heard] == [[group.rollouts[i].text for i in order] for order in orders]
    assert all(shown_in(prompt, "A") == [anchor.text for anchor in buffer.anchors] for prompt, _ in heard)
    assert [call.kind for call in calls] == ["batch"] * len(heard)
    check(method, group, buffer, score, [ladder(*each) for each in heard])
    assert method.calls(group, first=False) == (len(heard), len(heard))


@given(GROUPS, BUFFERS, st.sampled_from([2, 4]), SEEDS, st.sampled_from([0.3, 0.7, 1]))
@example([5, 3, None, 8], [1, 9], 2, 0, 1)
def test_score_leaves_a_failed_look_out(qualities, anchors, looks, seed, failing):
    method = RankBufferBatch(looks=looks, seed=seed)
    group, buffer = replace(make(qualities), epoch=1), buffer_of(anchors)
    score, _, heard = visit(method, group, buffer, erring(seed, 5, failing))
    answered = [ladder(*each) for each in heard if isinstance(each[1], str)]
    assume(not answered or len(shown_in(heard[-1][0])) == len(group.answered))  # smaller blocks are tested below
    check(method, group, buffer, score, answered)


@given(GROUPS)
def test_first_visit_is_against_the_references_or_the_papers_bootstrap(qualities):
    group = make(qualities)
    score, *_ = visit(RankBufferBatch(k0=3), group, None)
    assert score.before == initial_buffer(QUERY.responses, 3)
    batch, papers = RankBufferBatch(bootstrap=True), RankBuffer(bootstrap=True)
    assert visit(batch, group, None) == visit(papers, group, None)
    assert batch.calls(group, first=True) == papers.calls(group, first=True)


def test_arguments_that_make_no_sense_are_refused():
    assert RankBufferBatch(k0=5).responses_needed == 5
    for arguments, message in (
        ({"fine": False}, "fine cannot be false for rankbuffer_batch: use the method rankbuffer"),
        ({"anchor_content": False}, "anchor_content cannot be false for rankbuffer_batch: use the method rankbuffer"),
        ({"looks": 3}, "looks must be 1 or an even number, got 3"),
        ({"k0": 1}, "k0 must be at least 2, got 1"),
        ({"ladder": True}, "rankbuffer_batch has no argument 'ladder'"),
    ):
        with pytest.raises(SettingsError, match=f"^(method_args: )?{re.escape(message)}"):
            load_method("rankbuffer_batch", arguments, seed=1)


# Groups in halves


@given(st.integers(0, 20), st.integers(1, 21), st.integers(0, 50))
def test_partition_has_each_id_in_one_block(n, b, turn):
    ids = list(range(n))
    blocks = partition(ids, b, turn)
    assert sorted(i for block in blocks for i in block) == ids and all(blocks)
    if b < n:
        assert len(blocks) <= b
        assert max(map(len, blocks)) <= 2 * math.ceil(n / (2 * b))
    else:
        assert blocks == [[i] for i in ids]


def test_partition_halves_six_into_four_and_two_in_one_of_three_turns():
    assert [sorted(map(len, partition(range(6), 2, turn))) for turn in range(3)] == [[3, 3], [3, 3], [2, 4]]


@given(st.integers(2, 20), st.integers(1, 9))
def test_partition_lets_every_two_ids_meet_in_one_of_the_turns(n, b):
    turns = 3 if b == 2 else 2 * b - 1
    blocks = [block for turn in range(turns) for block in partition(range(n), b, turn)]
    met = {pair for block in blocks for pair in combinations(sorted(block), 2)}
    assert b >= n or met == set(combinations(range(n), 2))


def long_group(words: list[int]) -> RolloutGroup:
    """Rollouts of rising quality, each as long as its number of words says."""
    rollouts = (Rollout(i, f"{i}.r{i}" + "_long" * count) for i, count in enumerate(words))
    return RolloutGroup(QUERY, tuple(rollouts), step=0, epoch=0)


def slow_coordinates(heard, group, anchors) -> list[dict[str, Fraction]]:
    """The coordinates of the texts of each look. A look ends when every rollout was shown in it."""
    looks, seen = [{}], 0
    for prompt, answer in heard:
        if seen == len(group.answered):
            looks, seen = [*looks, {}], 0
        seen += len(shown_in(prompt))
        if isinstance(answer, str):
            merged = ladder(prompt, answer)
            for p in range(len(anchors) + 1):
                start = merged.index(anchors[p - 1]) + 1 if p else 0
                inside = merged[start : merged.index(anchors[p]) if p < len(anchors) else None]
                looks[-1] |= {text: p + Fraction(r + 1, len(inside) + 1) for r, text in enumerate(inside)}
    return [look for look in looks if look]


@given(st.integers(7, 9), BUFFERS, st.sampled_from([2, 4]), SEEDS, st.sampled_from([0, 0.2]))
def test_halves_are_merged_by_their_place_on_the_ladder(n, qualities, looks, seed, failing):
    method = RankBufferBatch(looks=looks, seed=seed)
    group, buffer, err = long_group([1] * n), buffer_of(qualities), erring(seed, 6, failing)
    score, _, heard = visit(
        method, group, buffer, lambda prompt: TransportError("long") if len(shown_in(prompt)) == n else err(prompt)
    )
    sizes = [len(shown_in(prompt)) for prompt, _ in heard]
    assert sizes[:looks] == [n] * looks and {3, 4, 5} >= set(sizes[looks:])
    anchors = [anchor.text for anchor in buffer.anchors]
    found = slow_coordinates(heard, group, anchors)
    own = {text: mean(look[text] for look in found if text in look) for look in found for text in look}
    orders = []  # of each look twice, so that equal coordinates draw
    for look in found:
        places = own | look | {anchor: Fraction(k + 1) for k, anchor in enumerate(anchors)}
        orders += [sorted(sorted(places, reverse=turned), key=places.get) for turned in (False, True)]
    everyone = slow_places(orders)
    assert score.positions == {
        r.id: sum(everyone[anchor] < everyone[r.text] for anchor in anchors) for r in group.rollouts if r.text in own
    }
    among = slow_places([[text for text in order if text in own] for order in orders])
    assert score.rewards == slow_rewards(group, among, len(own) - 1)


def refusing(limit: int, asked: list[int]):
    """A truthful judge with a short context: it refuses prompts of more than `limit` characters."""

    def answer(prompt: str):
        asked.append(len(shown_in(prompt)))
        return TransportError("400: the prompt is too long") if len(prompt) > limit else erring(0, 0)(prompt)

    return answer


def test_refused_group_is_asked_about_once_more_in_halves():
    group, asked = long_group([40] * 8), []
    score, calls, _ = visit(RankBufferBatch(), group, None, refusing(2600, asked))
    assert asked == [8, 8, 4, 4, 4, 4]
    assert sum(call.failed for call in calls) == 2
    assert RankBufferBatch().calls(group, first=True) == (2, 2), "the estimate has no second round"
    assert RankBufferBatch().asked_again(group) == 4 and RankBufferBatch().asked_again(long_group([40])) == 0
    assert None not in score.rewards and sorted(score.positions) == list(range(8))
    asked.clear()
    score, *_ = visit(RankBufferBatch(), group, None, refusing(1200, asked))
    assert asked == [8, 8, 4, 4, 4, 4], "once more, not again and again"
    assert set(score.rewards) == {None} and score.after.visits == 1


def test_refused_long_rollout_costs_its_half():
    group, asked = long_group([400, *[10] * 7]), []
    score, *_ = visit(RankBufferBatch(), group, None, refusing(2400, asked))
    assert asked == [8, 8, 4, 4, 4, 4]
    assert [r.id for r in group.rollouts if score.rewards[r.id] is None] == [0, 1, 6, 7]
