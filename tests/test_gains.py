"""What placements among shared anchors say about progress: against brute force, and against known truth."""

import math
from random import Random

import pytest
from conftest import by_number, group, numbers, scripted_judge
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store.gains import (
    FLOOR,
    LEAST_QUERIES,
    Visit,
    above_initial,
    by_window,
    compare,
    cut,
    newest_window,
    placements,
    preference,
    since_last_visit,
    visits,
)

REFERENCES, ROLLOUTS = 7, 8


def visit(above: dict, placed: int = 8, query_id: str = "q", epoch: int = 0, step: int = 0) -> Visit:
    return Visit(query_id, step, epoch, above, placed)


# Against brute force


def pairs(seed):
    """Return two visits of some queries among up to four anchors each; some anchors are shared."""
    random, made = Random(seed), []
    for i in range(random.randint(1, 30)):
        both = []
        for epoch in (0, 1):
            placed = random.randint(1, 8)
            names = random.sample("abcde", random.randint(0, 4))
            both.append(visit({name: random.randint(0, placed) for name in names}, placed, f"q{i}", epoch))
        made.append(tuple(both))
    return made


def slow_comparison(pairs):
    """The estimator of Mantel and Haenszel, by a loop over every rollout of every table."""
    terms = []
    for earlier, later in pairs:
        won = lost = 0.0
        for anchor in set(earlier.above) & set(later.above):
            old = [True] * earlier.above[anchor] + [False] * (earlier.placed - earlier.above[anchor])
            new = [True] * later.above[anchor] + [False] * (later.placed - later.above[anchor])
            for a in old:
                for b in new:
                    won += (b and not a) / (len(old) + len(new))
                    lost += (a and not b) / (len(old) + len(new))
        terms.append((won, lost))
    return terms


@given(st.integers(0).map(pairs))
def test_the_comparison_is_that_of_brute_force(pairs):
    terms = [(won, lost) for won, lost in slow_comparison(pairs) if won or lost]
    found = compare(pairs)
    assert found.queries == len(terms)
    if min(sum(won > 0 for won, _ in terms), sum(lost > 0 for _, lost in terms)) < LEAST_QUERIES:
        assert found.probability is None and "do not reach the policy" in found.reason
        return
    won, lost = (math.fsum(column) for column in zip(*terms, strict=True))
    odds = won / lost
    # The integral of the logistic density against the shifted logistic distribution, by a sum.
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    slow = sum(1 / (1 + (1 / u - 1) / odds) for u in grid) / len(grid)
    assert found.probability == pytest.approx(slow, abs=1e-3)
    n = len(terms)
    spread = math.sqrt(n / (n - 1) * sum((w / won - x / lost) ** 2 for w, x in terms))
    ends = [preference(math.log(odds) + 1.96 * z * spread) for z in (-1, 1)]
    assert found.low == pytest.approx(max(min(ends[0], found.probability - FLOOR), 0))
    assert found.high == pytest.approx(min(max(ends[1], found.probability + FLOOR), 1))


@given(st.integers(0).map(pairs))
def test_the_other_way_round_it_is_the_complement(pairs):
    there, back = compare(pairs), compare([(later, earlier) for earlier, later in pairs])
    assert there.queries == back.queries and (there.probability is None) == (back.probability is None)
    if there.probability is not None:
        assert there.probability == pytest.approx(1 - back.probability)
        assert (there.low, there.high) == (pytest.approx(1 - back.high), pytest.approx(1 - back.low))


@given(st.floats(-40, 40))
def test_the_preference_rises_and_is_symmetric(log_odds):
    assert preference(log_odds) == pytest.approx(1 - preference(-log_odds))
    assert preference(log_odds) <= preference(log_odds + 0.01)
    assert 0 <= preference(log_odds) <= 1


# Against known truth: a judge that errs, real buffers and their real update


def world(queries, drift, noise, epochs=2, start=0.0, seed=0):
    """Return visits of queries whose policy gains `drift` an epoch, in standard deviations of the references."""
    random = Random(f"{seed}/{drift}/{noise}/{start}")
    found = {}
    for q in range(queries):
        quality = {}

        def response(value, name, quality=quality):
            quality[name] = value
            return name

        values = sorted(random.gauss(0, 1) for _ in range(REFERENCES))
        buffer = initial_buffer([response(value, f"n{i}") for i, value in enumerate(values)], 4)
        mean = random.gauss(start, 1)
        found[f"q{q}"] = []
        for epoch in range(epochs):
            texts = [response(random.gauss(mean + epoch * drift, 0.25), f"e{epoch}r{i}") for i in range(ROLLOUTS)]
            sigma, above = insert(buffer, texts, quality, noise, random)
            found[f"q{q}"].append(visit(above, ROLLOUTS, f"q{q}", epoch, epoch * queries // 20 + q // 20))
            buffer = buffer.update(sigma, epoch, epoch)
    return found


def insert(buffer: AnchorBuffer, texts, quality, noise, random):
    """Place and order rollouts as the method does, by a judge that looks at each response with an error."""

    def looks(names):
        return [quality[name] + random.gauss(0, noise) for name in names]

    sigma = [[] for _ in range(len(buffer) + 1)]
    for i, text in enumerate(texts):
        *anchors, own = looks([*(anchor.text for anchor in buffer.anchors), text])
        sigma[sum(anchor < own for anchor in anchors)].append(Rollout(i, text))
    counts = [len(rollouts) for rollouts in sigma]
    above = {anchor.id: sum(counts[k + 1 :]) for k, anchor in enumerate(buffer.anchors)}
    for rollouts in sigma:
        order = dict(zip(rollouts, looks([rollout.text for rollout in rollouts]), strict=True))
        rollouts.sort(key=order.get)
    return sigma, above


def truth(drift, noise):
    """How often this judge prefers a response of the later epoch, one look at each."""
    return 0.5 * (1 + math.erf(drift / math.sqrt(2 * (0.25**2 + noise**2)) / math.sqrt(2)))


# From a store, as a run leaves it


def train(scorer, method=None, queries=12, epochs=3, gain=5, score=by_number):
    """Score groups of numbers that rise with the epoch, three queries a step. Return the scorer and its groups."""
    made = scorer(scripted_judge(score), method)
    random, seen = Random(5), []
    for epoch in range(epochs):
        for first in range(0, queries, 3):
            step = epoch * queries // 3 + first // 3
            groups = []
            for i in range(first, first + 3):
                texts = [str(random.randint(11, 50) + epoch * gain) for _ in range(4)]
                groups.append(group(numbers(f"q{i}"), " ".join(texts), step, epoch))
            scores = made.score(groups, step).scores
            seen += list(zip(groups, scores, strict=True))
    return made, seen


def test_visits_have_the_counts_of_the_placements(scorer):
    made, seen = train(scorer)
    found = visits(made.store)
    assert sum(map(len, found.values())) == len(seen)
    for group_, score in seen:
        (visit,) = [visit for visit in found[group_.query.id] if visit.step == group_.step]
        assert (visit.epoch, visit.placed) == (group_.epoch, 4)
        expected = {
            anchor.id: sum(int(rollout.text) > int(anchor.text) for rollout in group_.rollouts)
            for anchor in score.before.anchors
        }
        assert visit.above == expected


def test_a_rising_policy_is_preferred_and_a_falling_one_is_not(scorer):
    up, down = (since_last_visit(visits(train(scorer, queries=30, gain=gain)[0].store)) for gain in (5, -5))
    assert list(up) == list(down) == [1, 2]
    assert up[1].probability > 0.55 and down[1].probability < 0.45


def test_a_judge_that_does_not_see_the_anchors_has_compared_nothing(scorer):
    made, _ = train(scorer, RankBuffer(anchor_content=False), score=lambda messages: by_place(messages))
    assert visits(made.store) == {} and placements(made.store)
    assert newest_window(made.store, least=3) is None


def by_place(messages) -> str:
    """Answer an order-only question in the middle, and every other question by the numbers."""
    prompt = messages[0]["content"]
    return by_number(messages) if '"order"' in prompt.rpartition("Return ")[2] else '{"position": 2}'


def test_anchors_that_the_policy_has_left_behind_say_nothing(scorer):
    made, _ = train(scorer, gain=1000, epochs=2)
    comparison = since_last_visit(visits(made.store))[1]
    assert comparison.probability is None and str(comparison).startswith("not shown: fewer than 10 queries have")


def test_the_first_visit_of_a_bootstrapped_buffer_is_compared_with_nothing(scorer):
    made, _ = train(scorer, RankBuffer(bootstrap=True))
    for each in visits(made.store).values():
        assert not each[0].above and each[1].above and each[2].above
        assert compare([(each[0], each[1])]).queries == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers()), max_size=40), st.integers(1, 6))
def test_windows_hold_whole_steps(items, least):
    windows = cut(items, least)
    assert sorted(item for _, window in windows for item in window) == sorted(item for _, item in items)
    assert [step for step, _ in windows] == sorted(step for step, _ in windows)
    for number, (last, window) in enumerate(windows):
        first = windows[number - 1][0] if number else -1
        assert sorted(window) == sorted(item for step, item in items if first < step <= last)
        assert len(window) >= least or last == max(step for step, _ in items)
        before_last = [item for step, item in items if first < step < last]
        assert len(before_last) < least, "the window could have ended a step earlier"


def test_the_log_has_each_full_window_of_the_page(scorer):
    made = scorer(scripted_judge(by_number))
    random, logged = Random(5), {}
    for step in range(12):
        ids = [f"q{(3 * step + i) % 18}" for i in range(3)]
        groups = [
            group(numbers(id), " ".join(str(random.randint(1, 40)) for _ in range(4)), step, step // 6) for id in ids
        ]
        made.score(groups, step)
        if (found := newest_window(made.store, least=9)) is not None:
            logged[step] = found
    assert list(logged) == [8, 11]
    assert logged == by_window(visits(made.store), least=9)


def test_shares_above_the_initial_anchors_are_over_the_same_queries(scorer):
    made, seen = train(scorer)
    made.store.commit(99, [(group(numbers("new"), "1 2 3 4", 99, 2), seen[-1][1])], [])
    shares = {(share.epoch, share.anchor): share for share in above_initial(visits(made.store))}
    for epoch in range(3):
        for i, anchor in enumerate((10, 20, 30, 40)):
            texts = [int(rollout.text) for each, _ in seen if each.epoch == epoch for rollout in each.rollouts]
            share = shares[epoch, f"initial-{i}"]
            assert share.queries == 12 and share.low <= share.share <= share.high
            assert share.share == pytest.approx(sum(text > anchor for text in texts) / len(texts))


SAMPLES, QUERIES = 100, 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "drift", "bias", "covered"),
    [
        (0.09, 0.0, 0.01, 0.9),
        (0.09, 0.2, 0.02, 0.85),
        (0.09, -0.2, 0.02, 0.85),
        (0.3, 0.0, 0.025, 0.7),
        (0.3, 0.2, 0.045, 0.3),
        (0.3, -0.2, 0.045, 0.3),
    ],
)
def test_bias_and_coverage(noise, drift, bias, covered, record_property):
    """A sharp judge's interval holds. A blunt judge misplaces anchors, so its interval holds less often."""
    pool = list(world(4000, drift, noise).values())
    random, true = Random(1), truth(drift, noise)
    found = [compare(random.sample(pool, QUERIES)) for _ in range(SAMPLES)]
    error = sum(each.probability - true for each in found) / SAMPLES
    coverage = sum(each.low <= true <= each.high for each in found) / SAMPLES
    record_property("bias", round(error, 4))
    record_property("coverage", coverage)
    assert abs(error) < bias
    assert coverage >= covered
