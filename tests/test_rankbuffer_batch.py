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
from helpers.quality import EIGHT, QUERY, make
from helpers.truth import quality, truth
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, initial_buffer
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.judge.judge import explain
from rankbuffer_trl.judge.questions import GUARD_NOTE
from rankbuffer_trl.judge.reach import context_for
from rankbuffer_trl.ranking import rank_rewards
from rankbuffer_trl.rewards.method import load_method
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.rewards.rankbuffer_batch import RankBufferBatch, coordinates, partition

SEEDS = st.integers(0, 999)
LOOKS = st.sampled_from([1, 2, 4])
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


def blocks(prompt: str, letter: str) -> list[str]:
    """The texts of the anchors (A) or candidates (R) of a prompt, in the order in which they are shown."""
    shown = re.findall(rf"^\[{letter}(\d+)\]\n(.+)$", prompt, re.MULTILINE)
    assert [int(label) for label, _ in shown] == list(range(len(shown)))
    return [text for _, text in shown]


def erring(seed: int, noise: float, failing: float = 0.0):
    """A judge that errs by up to `noise` on each candidate, places it among true anchors, and fails now and then."""
    chance = random.Random(seed)

    def answer(prompt: str):
        if chance.random() < failing:
            return TransportError("refused")
        looks = [quality(text) + noise * chance.random() for text in blocks(prompt, "R")]
        anchors = [quality(text) for text in blocks(prompt, "A")]
        order = sorted(range(len(looks)), key=looks.__getitem__)
        positions = [sum(anchor < looks[slot] for anchor in anchors) for slot in order]
        return json.dumps({"order": order, "positions": positions})

    return answer


# The oracle: every look is a written-out ladder of texts; places are counted one by one.


def ladder(prompt: str, answer: str) -> list[str]:
    """The merged order of anchors and candidates that an answer stands for."""
    verdict, candidates, anchors = json.loads(answer), blocks(prompt, "R"), blocks(prompt, "A")
    merged = []
    for p in range(len(anchors) + 1):
        pairs = zip(verdict["order"], verdict["positions"], strict=True)
        merged += [candidates[slot] for slot, position in pairs if position == p] + anchors[p : p + 1]
    return merged


def mean(values) -> Fraction:
    values = list(values)
    return Fraction(sum(values)) / len(values)


def expected_rewards(group: RolloutGroup, places: dict[str, Fraction], highest: int) -> tuple:
    """Rewards by place from 0 to `highest`, above the empty rollouts."""
    e = len(group.empty)
    return tuple(
        -1.0
        if not rollout.text
        else None
        if rollout.text not in places
        else float(-1 + 2 * (e + places[rollout.text]) / (e + highest))
        if e + highest
        else 0.0
        for rollout in group.rollouts
    )


def check(method, group, buffer, score, ladders: list[list[str]]) -> None:
    """Compare a score with the ladders of all looks, each of which holds all placed rollouts."""
    anchors = [anchor.text for anchor in buffer.anchors]
    texts = {r.id: r.text for r in group.answered if any(r.text in each for each in ladders)}
    if not texts:
        assert score.rewards == tuple(None if r.text else -1.0 for r in group.rollouts)
        assert (score.order, score.positions, score.after) == ((), {}, buffer.visited())
        return
    everyone = {text: mean(each.index(text) for each in ladders) for text in ladders[0]}
    assert all(everyone[a] < everyone[b] for a, b in pairwise(anchors)), "the anchors' mean places keep their order"
    positions = {i: sum(everyone[anchor] < everyone[text] for anchor in anchors) for i, text in texts.items()}
    assert score.positions == positions
    own = {
        text: mean(sum(other in texts.values() for other in each[: each.index(text)]) for each in ladders)
        for text in texts.values()
    }
    places, highest = (everyone, len(ladders[0]) - 1) if method.ladder else (own, len(texts) - 1)
    assert score.rewards == expected_rewards(group, places, highest)
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


@settings(max_examples=200)
@given(GROUPS, BUFFERS, LOOKS, st.booleans(), SEEDS, st.sampled_from([0, 3, 20]))
@example([5], [1, 9], 2, True, 0, 0)
@example([None, 5], [1, 9], 2, False, 0, 0)
@example([4, 4, 4], [4, 4], 2, True, 0, 0)
@example([None] * 3, [1, 9], 2, False, 0, 0)
def test_scores_and_buffers_are_those_of_the_written_out_ladders(qualities, anchors, looks, by_ladder, seed, noise):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder, refine_at=2, prune_after=2)
    group, buffer = replace(make(qualities, step=3), epoch=1), buffer_of(anchors)
    score, calls, heard = visit(method, group, buffer, erring(seed, noise))
    n = len(group.answered)
    assert len(calls) == len(heard) == min(looks, math.factorial(n)) * (n > 0)
    assert {call.kind for call in calls} <= {"batch"}
    assert all(blocks(prompt, "A") == [anchor.text for anchor in buffer.anchors] for prompt, _ in heard)
    assert all(set(blocks(prompt, "R")) == {r.text for r in group.answered} for prompt, _ in heard)
    check(method, group, buffer, score, [ladder(*each) for each in heard])
    assert method.calls(group, first=False) == (len(heard), len(heard))


@settings(max_examples=100)
@given(GROUPS, BUFFERS, st.sampled_from([2, 4]), st.booleans(), SEEDS, st.sampled_from([0.3, 0.7]))
def test_a_look_that_failed_is_left_out(qualities, anchors, looks, by_ladder, seed, failing):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder)
    group, buffer = replace(make(qualities), epoch=1), buffer_of(anchors)
    score, _, heard = visit(method, group, buffer, erring(seed, 5, failing))
    answered = [ladder(*each) for each in heard if isinstance(each[1], str)]
    if answered and len(blocks(heard[-1][0], "R")) == len(group.answered):
        check(method, group, buffer, score, answered)


@settings(max_examples=40)
@given(GROUPS, BUFFERS, SEEDS)
def test_when_all_fails_the_buffer_only_counts_the_visit(qualities, anchors, seed):
    method, group, buffer = RankBufferBatch(seed=seed), make(qualities), buffer_of(anchors)
    check(method, group, buffer, visit(method, group, buffer, lambda prompt: TransportError("refused"))[0], [])


def test_the_reward_is_not_ranked_anew():
    """Rollouts 0 and 1 change places from look to look."""
    group, buffer = make([5, 5, 1, 9]), buffer_of([2, 8])
    score, calls, _ = visit(RankBufferBatch(), group, buffer)
    assert score.rewards == pytest.approx((0, 0, -1, 1))
    assert score.order == ((2,), (0, 1), (3,))
    assert score.positions == {0: 1, 1: 1, 2: 0, 3: 2}
    assert len(calls) == 2
    papers, *_ = visit(RankBuffer(), group, buffer)
    assert (score.positions, score.after) == (papers.positions, papers.after)


def test_the_ladder_says_how_far_apart_the_rollouts_are():
    buffer = buffer_of([1, 3, 5, 7, 9])
    near, far = make([4, 4, None, 4]), make([0, 10, None, 4])
    for method in (RankBufferBatch(), RankBufferBatch(looks=1)):
        assert visit(method, far, buffer)[0].rewards == pytest.approx((-1 / 3, 1, -1, 1 / 3))
    ladder = RankBufferBatch(ladder=True)
    assert visit(ladder, far, buffer)[0].rewards == pytest.approx((-1 + 2 / 8, 1, -1, -1 + 2 * 4 / 8))
    assert visit(ladder, near, buffer)[0].rewards == pytest.approx((0, 0, -1, 0))
    assert visit(ladder, make([10]), buffer)[0].rewards == (1,)
    assert visit(RankBufferBatch(), make([10]), buffer)[0].rewards == (0,)


@settings(max_examples=60)
@given(st.permutations(range(7)), BUFFERS, LOOKS, SEEDS, st.booleans())
def test_renaming_the_rollouts_changes_only_their_names(names, anchors, looks, seed, by_ladder):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder)
    before, after = (
        visit(method, make(values), buffer_of(anchors))[0] for values in ([*range(7)], [names[i] for i in range(7)])
    )
    assert after.rewards == tuple(before.rewards[i] for i in names)
    assert after.positions == {i: before.positions[name] for i, name in enumerate(names)}
    assert [a.text.partition(".")[0] for a in after.after.anchors] == [
        a.text.partition(".")[0] for a in before.after.anchors
    ]


def test_looks_are_balanced_and_share_the_anchors():
    _, _, heard = visit(RankBufferBatch(looks=4), make(EIGHT), None)
    shown = [blocks(prompt, "R") for prompt, _ in heard]
    assert shown[0] == shown[1][::-1] and shown[2] == shown[3][::-1] == shown[0][4:] + shown[0][:4]
    assert len({prompt.partition("\n\nCANDIDATES\n")[0] for prompt, _ in heard}) == 1


# The first visit, static buffers, arguments


@settings(max_examples=30)
@given(GROUPS)
def test_a_first_visit_is_against_the_references_or_the_papers_bootstrap(qualities):
    group = make(qualities)
    score, *_ = visit(RankBufferBatch(k0=3), group, None)
    assert score.before == initial_buffer(QUERY.responses, 3)
    batch, papers = RankBufferBatch(bootstrap=True, ladder=True), RankBuffer(bootstrap=True)
    assert visit(batch, group, None) == visit(papers, group, None)
    assert batch.calls(group, first=True) == papers.calls(group, first=True)
    assert batch.responses_needed == 0
    first = [question.prompt() for question in batch.first_questions(group)]
    assert first == [question.prompt() for question in papers.first_questions(group)]


def test_a_static_buffer_is_frozen_after_epoch_0():
    group, buffer = make([0, 10, 5, 5, 5]), initial_buffer(QUERY.responses, 4)
    static = RankBufferBatch(static=True)
    assert len(visit(static, group, buffer)[0].after) > 4
    assert visit(static, replace(group, epoch=1), buffer)[0].after == buffer.visited()


def test_questions_wait_for_the_whole_group_and_show_anchors_and_group():
    method = RankBufferBatch(k0=5)
    assert method.early_questions(make(EIGHT), None) == []
    assert method.most_shown(8) == 18
    assert method.responses_needed == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fine": False}, "fine cannot be false for rankbuffer_batch: use the method rankbuffer"),
        ({"anchor_content": False}, "anchor_content cannot be false for rankbuffer_batch: use the method rankbuffer"),
        ({"looks": 3}, "looks must be 1 or an even number, got 3"),
        ({"looks": 0}, "looks must be 1 or an even number, got 0"),
        ({"most_tokens": 0}, "most_tokens must be at least 1, or null for no limit, got 0"),
        ({"k0": 1}, "k0 must be at least 2, got 1"),
        ({"most_tokens": "x"}, "rankbuffer_batch needs an integer or null for 'most_tokens', got 'x'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(SettingsError, match=f"^(method_args: )?{re.escape(message)}"):
        load_method("rankbuffer_batch", arguments, seed=1)


# Blocks


@given(st.integers(0, 20), st.integers(1, 21), st.integers(0, 50))
def test_each_id_is_in_one_block(n, b, turn):
    ids = list(range(n))
    blocks = partition(ids, b, turn)
    assert sorted(i for block in blocks for i in block) == ids
    assert len(blocks) <= max(b, n) and all(blocks)
    if b < n:
        assert len(blocks) <= b
        assert max(map(len, blocks)) <= 2 * math.ceil(n / (2 * b))
    else:
        assert blocks == [[i] for i in ids]


@given(st.integers(2, 20), st.integers(1, 9))
def test_every_two_ids_meet_in_one_of_the_turns(n, b):
    turns = 3 if b == 2 else 2 * b - 1
    met = {
        pair
        for turn in range(turns)
        for block in partition(range(n), b, turn)
        for pair in combinations(sorted(block), 2)
    }
    assert b >= n or met == set(combinations(range(n), 2))


def test_eight_in_two_blocks():
    assert [partition(range(8), 2, turn) for turn in range(4)] == [
        [[0, 1, 6, 7], [2, 3, 4, 5]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 4, 5], [6, 7, 2, 3]],
        [[0, 1, 6, 7], [2, 3, 4, 5]],
    ]


def test_coordinates_lie_evenly_in_their_interval():
    block, half, third = (7, 3, 5), Fraction(1, 2), Fraction(1, 3)
    assert coordinates(block, [2, 0, 1], [0, 2, 2]) == {5: half, 7: 2 + third, 3: 2 + 2 * third}


# Split groups


def long_group(words: list[int]) -> RolloutGroup:
    """Rollouts of rising quality, each as long as its number of words says."""
    rollouts = (Rollout(i, f"{i}.r{i}" + "_long" * count) for i, count in enumerate(words))
    return RolloutGroup(QUERY, tuple(rollouts), step=0, epoch=0)


def need(prompt: str) -> int:
    """The context for a prompt and two answers if its responses, of one line each, are quoted."""
    n, K = len(blocks(prompt, "R")), len(blocks(prompt, "A"))
    characters = len(GUARD_NOTE) + len("\n\n") + len(prompt) + len("> ") * (n + K)
    longest = json.dumps({"order": [*range(n)], "positions": [K] * n})
    return context_for(math.ceil(characters / 3), len(longest) + 1)


LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=9)
LIMITS = st.integers(700, 1500)


@settings(max_examples=150)
@given(LENGTHS, LIMITS, st.sampled_from([1, 2, 4, 6]), SEEDS)
@example([10] * 8, 800, 6, 0)
def test_a_split_group_has_each_rollout_once_in_each_look_and_fits(words, limit, looks, seed):
    method, group = RankBufferBatch(looks=looks, seed=seed, most_tokens=limit), long_group(words)
    score, calls, heard = visit(method, group, None)
    shown = [blocks(prompt, "R") for prompt, _ in heard]
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
def test_every_two_share_a_prompt_after_three_pairs_of_looks(looks):
    method, group = RankBufferBatch(looks=looks, most_tokens=1020), long_group([40] * 8)
    _, calls, heard = visit(method, group, None)
    shown = [[quality(text) for text in blocks(prompt, "R")] for prompt, _ in heard]
    assert [len(block) for block in shown] == [4] * (2 * looks) and len(calls) == 2 * looks
    for look in range(looks):
        assert sorted(shown[2 * look] + shown[2 * look + 1]) == list(range(8))
    for k in range(0, 2 * looks, 4):
        assert (shown[k], shown[k + 1]) == (shown[k + 2][::-1], shown[k + 3][::-1]), "a look and its reverse"
    met = {frozenset(pair) for block in shown for pair in combinations(block, 2)}
    assert len(met) == (28 if looks == 6 else 12)


def slow_split(heard, group, anchors, looks) -> list[dict[str, Fraction]]:
    """The coordinates of texts in each look that was heard of, in which every text has one."""
    found, shown, at = [], [], 0
    for _ in range(looks):
        look, seen = {}, 0
        while seen < len(group.answered):
            prompt, answer = heard[at]
            at, texts = at + 1, blocks(prompt, "R")
            seen += len(texts)
            if isinstance(answer, str):
                merged = ladder(prompt, answer)
                for p in range(len(anchors) + 1):
                    start = merged.index(anchors[p - 1]) + 1 if p else 0
                    inside = merged[start : merged.index(anchors[p]) if p < len(anchors) else None]
                    look |= {text: p + Fraction(r + 1, len(inside) + 1) for r, text in enumerate(inside)}
        found.append(look)
    assert at == len(heard)
    found = [look for look in found if look]
    for text in {text for look in found for text in look}:
        own = mean(look[text] for look in found if text in look)
        shown.append((text, own))
    return [{text: look.get(text, own) for text, own in shown} for look in found]


@settings(max_examples=100)
@given(st.integers(7, 9), BUFFERS, st.sampled_from([2, 4]), st.booleans(), SEEDS, st.sampled_from([0, 0.2]))
def test_blocks_are_merged_by_their_place_on_the_ladder(n, qualities, looks, by_ladder, seed, failing):
    method = RankBufferBatch(looks=looks, seed=seed, ladder=by_ladder, most_tokens=1050)
    group, buffer = long_group([40] * n), buffer_of(qualities)
    score, _, heard = visit(method, group, buffer, erring(seed, 6, failing))
    sizes = [len(blocks(prompt, "R")) for prompt, _ in heard]
    assert {3, 4} >= set(sizes[: 2 * looks])
    if 2 in sizes:
        return  # smaller blocks were asked about, which is tested below
    anchors = [anchor.text for anchor in buffer.anchors]
    levels = slow_split(heard, group, anchors, looks)
    placed = {text for look in levels for text in look}

    def place(text, among):
        """The mean over looks of how many of `among` are below, half for a draw."""
        return mean(
            sum(Fraction((look[other] < look[text]) * 2 + (look[other] == look[text]), 2) for other in among - {text})
            for look in [look | {anchor: Fraction(k + 1) for k, anchor in enumerate(anchors)} for look in levels]
        )

    everyone = placed | set(anchors)
    positions = {
        r.id: sum(place(anchor, everyone) < place(r.text, everyone) for anchor in anchors)
        for r in group.rollouts
        if r.text in placed
    }
    assert score.positions == positions
    among = everyone if by_ladder else placed
    assert score.rewards == expected_rewards(group, {text: place(text, among) for text in placed}, len(among) - 1)


def refusing(limit: int, asked: list[int]):
    """A truthful judge with a short context: it refuses prompts of more than `limit` characters."""

    def answer(prompt: str):
        asked.append(len(blocks(prompt, "R")))
        return TransportError("400: the prompt is too long") if len(prompt) > limit else erring(0, 0)(prompt)

    return answer


def test_a_refused_group_is_asked_about_once_more_in_halves():
    group, asked = long_group([40] * 8), []
    score, calls, _ = visit(RankBufferBatch(), group, None, refusing(2600, asked))
    assert asked == [8, 8, 4, 4, 4, 4]
    assert sum(call.failed for call in calls) == 2
    assert len(calls) == 6 and RankBufferBatch().calls(group, first=True) == (2, 2), "the estimate has no second round"
    assert None not in score.rewards and sorted(score.positions) == list(range(8))
    asked.clear()
    score, *_ = visit(RankBufferBatch(), group, None, refusing(1200, asked))
    assert asked == [8, 8, 4, 4, 4, 4], "once more, not again and again"
    assert set(score.rewards) == {None} and score.after.visits == 1


def test_a_long_rollout_costs_its_half_or_with_a_limit_nobody_else():
    group, asked = long_group([400, *[10] * 7]), []
    score, *_ = visit(RankBufferBatch(), group, None, refusing(2400, asked))
    assert asked == [8, 8, 4, 4, 4, 4]
    assert [r.id for r in group.rollouts if score.rewards[r.id] is None] == [0, 1, 6, 7]
    asked.clear()
    score, calls, _ = visit(RankBufferBatch(most_tokens=1100), group, None, refusing(2400, asked))
    assert sorted(asked) == [1, 7, 7], "the long one is asked about alone"
    assert [r.id for r in group.rollouts if score.rewards[r.id] is None] == [0]
    assert score.rewards[1:] == tuple(float(-1 + Fraction(2 * i, 6)) for i in range(7))
    assert "too long" in explain(next(call for call in calls if call.failed))


def test_a_refused_block_of_a_split_group_is_halved_and_joins_the_others():
    group, asked = long_group([100, 100, 10, 10, 10, 10, 100, 100]), []
    score, *_ = visit(RankBufferBatch(most_tokens=1500), group, None, refusing(2500, asked))
    assert asked == [4, 4, 4, 4, 2, 2, 2, 2], "0, 1, 6 and 7 shared a block"
    assert None not in score.rewards
    assert score.rewards == tuple(sorted(score.rewards))


def test_one_answer_alone_is_asked_about_once():
    for method in (RankBufferBatch(), RankBufferBatch(looks=4, most_tokens=1), RankBufferBatch(most_tokens=10**6)):
        score, calls, _ = visit(method, make([None, 6, None]), None)
        assert len(calls) == 1 and score.rewards == (-1, 1, -1) and score.positions == {1: 2}


def test_a_run_of_visits_grows_a_buffer_as_the_paper_does_for_a_judge_without_error():
    batch, papers = None, None
    for epoch, qualities in enumerate([[0, 3, 6], [6, 9, 10], [3, 5, 8], [1, 4, 7], [2, 2.5, 2.7]]):
        rollouts = tuple(Rollout(i, f"{int(10 * q)}.e{epoch}r{i}") for i, q in enumerate(qualities))
        query = replace(QUERY, responses=tuple(f"{10 * q}.ref" for q in (1, 2, 4, 5, 7, 8, 9)))
        group = RolloutGroup(query, rollouts, step=epoch, epoch=epoch)
        first, *_ = visit(RankBufferBatch(prune_after=2), group, batch)
        second, *_ = visit(RankBuffer(prune_after=2), group, papers)
        assert first.rewards == pytest.approx(rank_rewards(second.order, 3))
        batch, papers = first.after, second.after
        assert batch == papers
    assert len(batch) != 4
