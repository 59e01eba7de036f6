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
from helpers.quality import EIGHT
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.judge.judge import explain
from rankbuffer_trl.judge.questions import GUARD_NOTE
from rankbuffer_trl.judge.reach import context_for
from rankbuffer_trl.rewards.looks import balanced
from rankbuffer_trl.rewards.method import load_method
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.rewards.rankbuffer_batch import RankBufferBatch, partition
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
    places, highest = (everyone, len(ladders[0]) - 1) if method.ladder else (own, len(texts) - 1)
    assert score.rewards == slow_rewards(group, places, highest)
    levels = sorted({places[text] for text in texts.values()})
    assert [set(tier) for tier in score.order] == [{i for i in texts if places[texts[i]] == q} for q in levels]
    sigma = [
        tuple(group.rollouts[i] for i in sorted(texts, key=lambda i: (everyone[texts[i]], i)) if positions[i] == p)
        for p in range(len(anchors) + 1)
    ]
    assert score.fine_ranked == any(len(rollouts) > 1 for rollouts in sigma)
    updated = buffer.update(
        sigma, group.known_epoch, group.step, H=method.prune_after, refine_at=method.refine_at
    ).visited()
    assert (score.before, score.after) == (buffer, updated), "the paper's update, given the same intervals"


@given(GROUPS, BUFFERS, LOOKS, st.booleans(), SEEDS, st.sampled_from([0, 3, 20]))
@example([5], [1, 9], 2, True, 0, 0)
@example([None, 5], [1, 9], 2, False, 0, 0)
@example([4, 4, 4], [4, 4], 2, True, 0, 0)
@example([None] * 3, [1, 9], 2, False, 0, 0)
@example([3, 5, 8], [1, 9], 6, True, 0, 20)
@example([3, 5, 8], [1, 9], 6, False, 1, 20)
def test_score_and_buffer_are_those_of_the_written_out_ladders(qualities, anchors, looks, by_ladder, seed, noise):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder, refine_at=2, prune_after=2)
    group, buffer = replace(make(qualities, step=3), epoch=1), buffer_of(anchors)
    score, calls, heard = visit(method, group, buffer, erring(seed, noise))
    orders = balanced([rollout.id for rollout in group.answered], looks, seed, group) if group.answered else []
    assert [shown_in(prompt) for prompt, _ in heard] == [[group.rollouts[i].text for i in order] for order in orders]
    assert all(shown_in(prompt, "A") == [anchor.text for anchor in buffer.anchors] for prompt, _ in heard)
    assert [call.kind for call in calls] == ["batch"] * len(heard)
    check(method, group, buffer, score, [ladder(*each) for each in heard])
    assert method.calls(group, first=False) == (len(heard), len(heard))


@given(GROUPS, BUFFERS, st.sampled_from([2, 4]), st.booleans(), SEEDS, st.sampled_from([0.3, 0.7, 1]))
@example([5, 3, None, 8], [1, 9], 2, False, 0, 1)
def test_score_leaves_a_failed_look_out(qualities, anchors, looks, by_ladder, seed, failing):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder)
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
    batch, papers = RankBufferBatch(bootstrap=True, ladder=True), RankBuffer(bootstrap=True)
    assert visit(batch, group, None) == visit(papers, group, None)
    assert batch.calls(group, first=True) == papers.calls(group, first=True)
    first = [question.prompt() for question in batch.first_questions(group)]
    assert first == [question.prompt() for question in papers.first_questions(group)]


def test_arguments_that_make_no_sense_are_refused():
    assert RankBufferBatch(k0=5).responses_needed == 5
    assert RankBufferBatch().early_questions(make(EIGHT), None) == [], "questions wait for the whole group"
    for arguments, message in (
        ({"fine": False}, "fine cannot be false for rankbuffer_batch: use the method rankbuffer"),
        ({"anchor_content": False}, "anchor_content cannot be false for rankbuffer_batch: use the method rankbuffer"),
        ({"looks": 3}, "looks must be 1 or an even number, got 3"),
        ({"most_tokens": 0}, "most_tokens must be at least 1, or null for no limit, got 0"),
        ({"k0": 1}, "k0 must be at least 2, got 1"),
        ({"most_tokens": "x"}, "rankbuffer_batch needs an integer or null for 'most_tokens', got 'x'"),
    ):
        with pytest.raises(SettingsError, match=f"^(method_args: )?{re.escape(message)}"):
            load_method("rankbuffer_batch", arguments, seed=1)


# Split groups


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


def need(prompt: str) -> int:
    """The context for a prompt and two answers if its responses, of one line each, are quoted."""
    n, K = len(shown_in(prompt)), len(shown_in(prompt, "A"))
    characters = len(GUARD_NOTE) + len("\n\n") + len(prompt) + len("> ") * (n + K)
    longest = json.dumps({"order": [*range(n)], "positions": [K] * n})
    return context_for(math.ceil(characters / 3), len(longest) + 1)


LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=9)
LIMITS = st.integers(700, 1500)


@given(LENGTHS, LIMITS, st.sampled_from([1, 2, 4, 6]), SEEDS)
@example([10] * 8, 800, 6, 0)
@example([6], 1, 4, 0)
def test_split_has_each_rollout_once_in_each_look_and_fits(words, limit, looks, seed):
    method, group = RankBufferBatch(looks=looks, seed=seed, most_tokens=limit), long_group(words)
    score, calls, heard = visit(method, group, None)
    shown = [shown_in(prompt) for prompt, _ in heard]
    assert all(len(texts) == 1 or need(prompt) <= limit for texts, (prompt, _) in zip(shown, heard, strict=True))
    counts = {r.text: sum(r.text in texts for texts in shown) for r in group.rollouts}
    assert all(0 < count <= looks for count in counts.values())
    if looks <= 4:  # small blocks have few orders, and no prompt comes twice
        few = {text for texts in shown if len(texts) <= 2 for text in texts}
        assert all(count == looks for text, count in counts.items() if text not in few)
    assert len({prompt for prompt, _ in heard}) == len(heard)
    least, most = method.calls(group, first=False)
    assert least <= len(calls) <= most
    assert method.calls(group, first=True) == (len(calls),) * 2
    assert [question.prompt() for question in method.first_questions(group)] == [prompt for prompt, _ in heard]
    one, _, whole = visit(RankBufferBatch(looks=looks, seed=seed), group, None)
    if all(need(prompt) <= limit for prompt, _ in whole):
        assert (score, heard) == (one, whole), "what fits is not split"
    elif len(words) > 1:
        assert max(map(len, shown)) < len(words)


@pytest.mark.parametrize("looks", [2, 6])
def test_split_brings_every_two_together_after_three_pairs_of_looks(looks):
    method, group = RankBufferBatch(looks=looks, most_tokens=1020), long_group([40] * 8)
    _, _, heard = visit(method, group, None)
    shown = [[quality(text) for text in shown_in(prompt)] for prompt, _ in heard]
    assert [len(block) for block in shown] == [4] * (2 * looks)
    for look in range(looks):
        assert sorted(shown[2 * look] + shown[2 * look + 1]) == list(range(8))
    for k in range(0, 2 * looks, 4):
        assert (shown[k], shown[k + 1]) == (shown[k + 2][::-1], shown[k + 3][::-1]), "a look and its reverse"
    met = {frozenset(pair) for block in shown for pair in combinations(block, 2)}
    assert len(met) == (28 if looks == 6 else 12)


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


@given(st.integers(7, 9), BUFFERS, st.sampled_from([2, 4]), st.booleans(), SEEDS, st.sampled_from([0, 0.2]))
def test_split_blocks_are_merged_by_their_place_on_the_ladder(n, qualities, looks, by_ladder, seed, failing):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder, most_tokens=1050)
    group, buffer = long_group([40] * n), buffer_of(qualities)
    score, _, heard = visit(method, group, buffer, erring(seed, 6, failing))
    sizes = [len(shown_in(prompt)) for prompt, _ in heard]
    assert {3, 4} >= set(sizes[: 2 * looks])
    assume(2 not in sizes)  # smaller blocks were asked about, which is tested below
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
    if by_ladder:
        assert score.rewards == slow_rewards(group, everyone, len(everyone) - 1)
    else:
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


def test_refused_long_rollout_costs_its_half_or_with_a_limit_nobody_else():
    group, asked = long_group([400, *[10] * 7]), []
    score, *_ = visit(RankBufferBatch(), group, None, refusing(2400, asked))
    assert asked == [8, 8, 4, 4, 4, 4]
    assert [r.id for r in group.rollouts if score.rewards[r.id] is None] == [0, 1, 6, 7]
    asked.clear()
    score, calls, _ = visit(RankBufferBatch(most_tokens=1100), group, None, refusing(2400, asked))
    assert sorted(asked) == [1, 7, 7], "the long one is asked about alone"
    assert score.rewards == (None, *(float(-1 + Fraction(2 * i, 6)) for i in range(7)))
    assert "too long" in explain(next(call for call in calls if call.failed))


def test_refused_block_of_a_split_group_is_halved_and_joins_the_others():
    group, asked = long_group([100, 100, 10, 10, 10, 10, 100, 100]), []
    score, *_ = visit(RankBufferBatch(most_tokens=1500), group, None, refusing(2500, asked))
    assert asked == [4, 4, 4, 4, 2, 2, 2, 2], "0, 1, 6 and 7 shared a block"
    assert None not in score.rewards
    assert score.rewards == tuple(sorted(score.rewards))
