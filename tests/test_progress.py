"""What placements among shared anchors say about progress: against brute force, and against known truth."""

import math
from random import Random

import pytest
from conftest import by_number, group, numbers, scripted_judge
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.report.progress import above_initial, above_middle, by_window, rise_table
from rankbuffer_trl.buffer import AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.monitoring.progress import (
    FLOOR,
    LEAST_QUERIES,
    Comparison,
    OpenWindow,
    Visit,
    compare_visits,
    cut,
    newest_window,
    percent,
    placements,
    preference,
    since_last_visit,
    visits_by_query,
)
from rankbuffer_trl.rewards._llm_buffer import LLMBuffer
from rankbuffer_trl.rewards._rankbuffer import RankBuffer

REFERENCES, ROLLOUTS = 7, 8


def visit(above: dict, placed: int = 8, query_id: str = "q", epoch: int = 0, step: int = 0) -> Visit:
    return Visit(query_id, step, epoch, above, placed)


# Against brute force


def pairs(seed):
    """Return two visits of some queries among up to four anchors each; some anchors are shared.

    A visit at which all judgments failed has placed nothing.
    """
    random, made = Random(seed), []
    for i in range(random.randint(1, 30)):
        both = []
        for epoch in (0, 1):
            placed = random.randint(0, 8)
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
def test_compare_is_the_estimator_by_brute_force(pairs):
    terms = [(won, lost) for won, lost in slow_comparison(pairs) if won or lost]
    found = compare_visits(pairs)
    assert found.queries == len(terms)
    if min(sum(won > 0 for won, _ in terms), sum(lost > 0 for _, lost in terms)) < LEAST_QUERIES:
        assert found.probability is None and "do not reach the policy" in found.reason
        return
    won, lost = (math.fsum(column) for column in zip(*terms, strict=True))
    log_odds = math.log(won / lost)
    assert found.probability == pytest.approx(preference(log_odds)) and FLOOR == 0.015
    n = len(terms)
    spread = math.sqrt(n / (n - 1) * sum((w / won - x / lost) ** 2 for w, x in terms))
    ends = [preference(log_odds + 1.96 * z * spread) for z in (-1, 1)]
    assert found.low == pytest.approx(max(min(ends[0], found.probability - FLOOR), 0))
    assert found.high == pytest.approx(min(max(ends[1], found.probability + FLOOR), 1))


@given(st.floats(-40, 40) | st.floats(-0.01, 0.01))
def test_preference_is_the_integral_of_one_logistic_against_another(log_odds):
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    slow = sum(1 / (1 + (1 / u - 1) / math.exp(log_odds)) for u in grid) / len(grid)
    assert preference(log_odds) == pytest.approx(slow, abs=1e-3)
    assert preference(log_odds) == pytest.approx(1 - preference(-log_odds))
    assert preference(log_odds) <= preference(log_odds + 0.01) <= 1


def test_percent_is_whole_between_the_ends():
    shares = (0, 0.0099, 0.01, 0.5, 0.99, 0.9901, 1)
    assert list(map(percent, shares)) == ["< 1 %", "< 1 %", "1 %", "50 %", "99 %", "> 99 %", "> 99 %"]
    assert str(Comparison(20, 0.5, 0.25, 0.995)) == "50 % (25 % to > 99 %)"


# Against known truth: a judge that errs, real buffers and their real update


def world(queries, drift, noise):
    """Return two visits of queries whose policy gains `drift` an epoch, in standard deviations of the references."""
    random = Random(f"0/{drift}/{noise}/0.0")
    found = {}
    for q in range(queries):
        quality = {}

        def response(value, name, quality=quality):
            quality[name] = value
            return name

        values = sorted(random.gauss(0, 1) for _ in range(REFERENCES))
        buffer = initial_buffer([response(value, f"n{i}") for i, value in enumerate(values)], 4)
        mean = random.gauss(0, 1)
        found[f"q{q}"] = []
        for epoch in range(2):
            texts = [response(random.gauss(mean + epoch * drift, 0.25), f"e{epoch}r{i}") for i in range(ROLLOUTS)]
            sigma, above = insert(buffer, texts, quality, noise, random)
            found[f"q{q}"].append(visit(above, ROLLOUTS, f"q{q}", epoch))
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


def train(scorer, method=None, queries=12, epochs=3, gain=5, score=by_number, anchors="10 20 30 40"):
    """Score groups of numbers that rise with the epoch, three queries a step. Return the store and its groups."""
    made = scorer(scripted_judge(score), method)
    made.store.rows("PRAGMA synchronous = OFF")
    random, seen = Random(5), []
    for epoch in range(epochs):
        for first in range(0, queries, 3):
            step = epoch * queries // 3 + first // 3
            groups = []
            for i in range(first, first + 3):
                texts = [str(random.randint(11, 50) + epoch * gain) for _ in range(4)]
                groups.append(group(numbers(f"q{i}", anchors), " ".join(texts), step, epoch))
            scores = made.score(groups, step).scores
            seen += list(zip(groups, scores, strict=True))
    return made.store, seen


@pytest.mark.parametrize(
    "method", [RankBuffer(), RankBuffer(k0=12), RankBuffer(bootstrap=True), LLMBuffer(look_ahead=True)], ids=str
)
def test_visits_have_the_counts_of_the_placements(scorer, method):
    """A manager that looks ahead places a group among anchors that the store does not hold."""
    store, seen = train(scorer, method, anchors=" ".join(map(str, range(5, 65, 5))))
    found = visits_by_query(store)
    assert sum(map(len, found.values())) == len(seen)
    kept: dict[str, AnchorBuffer | None] = {}
    for group_, score in seen:
        query_id = group_.query.id
        (visit,) = [visit for visit in found[query_id] if visit.step == group_.step]
        known = () if score.before is None else score.before.anchors
        if query_id in kept and len(kept[query_id]) != len(known):
            known = ()
        values = [int(rollout.text) for rollout in group_.rollouts]
        assert visit.above == {anchor.id: sum(value > int(anchor.text) for value in values) for anchor in known}
        assert (visit.epoch, visit.placed) == (group_.epoch, 4 if score.before else 0)
        assert placements(store, query_id=query_id) == {query_id: found[query_id]}
        kept[query_id] = score.after
    for each in found.values():
        assert bool(each[0].above) == (not getattr(method, "bootstrap", False))
        assert bool(each[1].above) == (not isinstance(method, LLMBuffer))


def test_since_last_visit_prefers_a_rising_policy_and_not_a_falling_one(scorer):
    up, down = (since_last_visit(visits_by_query(train(scorer, queries=30, gain=gain)[0])) for gain in (5, -5))
    assert list(up) == list(down) == [1, 2]
    assert up[1].probability > 0.55 and down[1].probability < 0.45


def test_visits_of_a_judge_that_does_not_see_the_anchors_are_none(scorer):
    store, _ = train(scorer, RankBuffer(anchor_content=False), score=by_place)
    assert visits_by_query(store) == {} and placements(store)
    assert newest_window(store, OpenWindow(), least=3) is None


def by_place(messages) -> str:
    """Answer an order-only question in the middle, and every other question by the numbers."""
    prompt = messages[0]["content"]
    return by_number(messages) if '"order"' in prompt.rpartition("Return ")[2] else '{"position": 2}'


def test_since_last_visit_says_nothing_of_anchors_left_behind(scorer):
    store, _ = train(scorer, gain=1000, epochs=2)
    comparison = since_last_visit(visits_by_query(store))[1]
    assert comparison.probability is None and str(comparison).startswith("not shown: fewer than 10 queries have")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers()), max_size=40), st.integers(1, 6))
def test_cut_makes_windows_of_whole_steps(items, least):
    windows = cut(items, least)
    assert sorted(item for _, window in windows for item in window) == sorted(item for _, item in items)
    assert [step for step, _ in windows] == sorted(step for step, _ in windows)
    for number, (last, window) in enumerate(windows):
        first = windows[number - 1][0] if number else -1
        assert sorted(window) == sorted(item for step, item in items if first < step <= last)
        assert len(window) >= least or last == max(step for step, _ in items)
        before_last = [item for step, item in items if first < step < last]
        assert len(before_last) < least, "the window could have ended a step earlier"


def test_newest_window_logs_each_full_window_of_the_page(scorer):
    made = scorer(scripted_judge(by_number))
    random, logged, window, epoch = Random(5), {}, OpenWindow(), OpenWindow()
    for step in range(12):
        texts = {f"q{(3 * step + i) % 18}": [str(random.randint(1, 40)) for _ in range(4)] for i in range(3)}
        made.score([group(numbers(id), " ".join(each), step, step // 6) for id, each in texts.items()], step)
        found = newest_window(made.store, window, least=9)
        assert found == newest_window(made.store, OpenWindow(), least=9), "after a resume, too"
        whole = newest_window(made.store, epoch, least=100)
        assert (whole is None) == (step < 11) and whole == newest_window(made.store, OpenWindow(), least=100)
        if found is not None:
            logged[step] = found
    assert list(logged) == [8, 11]
    found = visits_by_query(made.store)
    assert logged == by_window(found, least=9)
    assert list(by_window(found, least=12)) == [11], "what is left of an epoch joins the window before it"
    assert by_window(found, least=100) == {11: whole} == {11: since_last_visit(found)[1]}, "one for a small epoch"


def test_above_initial_is_the_share_over_the_same_queries(scorer):
    store, seen = train(scorer)
    store.commit(99, [(group(numbers("new"), "1 2 3 4", 99, 2), seen[-1][1])], [])
    shares = {(share.epoch, share.anchor): share for share in above_initial(visits_by_query(store))}
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
    [(0.09, 0.0, 0.01, 0.9), (0.09, 0.2, 0.02, 0.85), (0.3, 0.0, 0.02, 0.7), (0.3, 0.2, 0.02, 0.7)],
)
def test_compare_has_a_small_bias_and_its_interval_holds(noise, drift, bias, covered):
    """A sharp judge's interval holds. A blunt judge misplaces anchors, so its interval holds less often."""
    pool = list(world(4000, drift, noise).values())
    random, true = Random(1), truth(drift, noise)
    found = [compare_visits(random.sample(pool, QUERIES)) for _ in range(SAMPLES)]
    assert abs(sum(each.probability - true for each in found) / SAMPLES) < bias
    assert sum(each.low <= true <= each.high for each in found) / SAMPLES >= covered


def test_above_initial_leaves_out_a_query_that_was_once_not_placed_at_all():
    found = {f"q{i}": [Visit(f"q{i}", epoch, epoch, {"initial-0": 3}, 4) for epoch in range(2)] for i in range(11)}
    found["q0"][1] = Visit("q0", 1, 1, {"initial-0": 0}, 0)
    assert [(one.epoch, one.queries, one.share) for one in above_initial(found)] == [(0, 10, 0.75), (1, 10, 0.75)]


def test_rise_table_compares_each_visit_with_the_first_and_puts_the_lowest_first():
    above = {"up": (1, 2, 4), "down": (3, 1), "once": (2,), "even": (2, 2)}
    found = {id: [visit({"initial-0": n}, 4, epoch=e) for e, n in enumerate(counts)] for id, counts in above.items()}
    up, down = {"visit_1": 6 / 8, "visit_2": 1.0}, {"visit_1": 1 / 10, "visit_2": None}
    even = {"visit_1": 0.5, "visit_2": None}
    assert rise_table(found) == [{"query": "down"} | down, {"query": "even"} | even, {"query": "up"} | up]


def test_above_middle_counts_each_query_by_its_own_middle_response():
    four, five = {"initial-0": 4, "initial-3": 1, "initial-4": 0}, {"initial-0": 4, "initial-4": 3, "initial-5": 0}
    lost = {"initial-0": 4}
    visited = [(four, four)] * 30 + [(five, five)] * 10 + [(four, lost)] * 10
    found = {str(i): [visit(above, 4, epoch=e) for e, above in enumerate(pair)] for i, pair in enumerate(visited)}
    assert [(each.queries, each.share) for each in above_middle(found)] == [(40, 0.375)] * 2
