"""Reward methods behind their one interface: what they cost, what holds for all, each against a slow oracle."""

import asyncio
import dataclasses
import importlib
import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, Optional

import pytest
from conftest import ROOT, scripted_judge
from helpers.quality import CASES, EIGHT, QUALITIES, QUERY, RIGHT, fails, faulty, make, play
from helpers.truth import RUBRICS, SHOWN, quality, truth, unguarded
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import TransportError, ranking_question
from rankbuffer_trl.ranking import rank_rewards
from rankbuffer_trl.rewards.arenarl import ArenaRL
from rankbuffer_trl.rewards.gdpo import GDPO
from rankbuffer_trl.rewards.listwise import Listwise
from rankbuffer_trl.rewards.llm_buffer import LLMBuffer
from rankbuffer_trl.rewards.method import GroupScore, load_method
from rankbuffer_trl.rewards.pairwise_rank import PairwiseRank
from rankbuffer_trl.rewards.pointwise import Pointwise
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.rewards.rankbuffer_batch import RankBufferBatch
from rankbuffer_trl.rewards.rankbuffer_looks import RankBufferLooks
from rankbuffer_trl.rewards.rrc_agr import RRCAGR
from rankbuffer_trl.rewards.rrc_scr import RRCSCR
from rankbuffer_trl.rewards.tournament import Tournament
from rankbuffer_trl.training.scorer import stand_in

METHODS = (
    Pointwise(),
    GDPO(),
    Tournament(),
    RRCAGR(),
    RRCSCR(),
    PairwiseRank(),
    ArenaRL(),
    RankBuffer(),
    RankBuffer(bootstrap=True),
    LLMBuffer(),
    LLMBuffer(look_ahead=True),
    Listwise(),
    Listwise(looks=4, again=False),
    Listwise(looks=1),
    Listwise(looks=4, blocks_of_four=True),
    RankBufferLooks(),
    RankBufferLooks(looks=4, bootstrap=True),
    RankBufferBatch(),
    RankBufferBatch(looks=4, ladder=True),
)
every_method = pytest.mark.parametrize("method", METHODS, ids=str)


# How many questions


@pytest.mark.parametrize(
    ("method", "count"),
    zip(
        METHODS,
        (8, 8 * 3, 21, 56, 28, 28, 28, 8 + 3, 1, 8 + 3 + 1, 8 + 3, 2, 4, 1, 8, 8 + 3 * 2, 1, 2, 4),
        strict=True,
    ),
    ids=str,
)
def test_a_group_of_eight_costs_what_the_paper_says(method, count):
    group = make(EIGHT)  # 2 and 3, 5 and 6, and 8 to 10 share an interval
    assert len(play(method, group).calls) == count
    least, most = method.calls(group, first=True)
    assert least <= count <= most
    if not isinstance(method, LLMBuffer) and method not in (RankBuffer(), Listwise(), RankBufferLooks()):
        assert least == most


@every_method
@settings(max_examples=40)
@given(QUALITIES)
@example([None] * 3)
def test_no_group_costs_less_or_more_than_calls_says(method, qualities):
    least, most = method.calls(make(qualities), first=True)
    assert least <= len(play(method, make(qualities)).calls) <= most
    n = len(make(qualities).answered)
    exact = {"pointwise": n, "gdpo": 3 * n, "tournament": 3 * max(n - 1, 0), "rrc_agr": 7 * n}
    exact |= {"rrc_scr": math.comb(n, 2), "pairwise_rank": math.comb(n, 2), "arenarl": 4 * max(n - 1, 0)}
    if method.name in exact:
        assert least == most == exact[method.name]


@every_method
@pytest.mark.parametrize("size", range(1, 10))
def test_all_in_one_interval_and_each_in_its_own_are_within_calls(method, size):
    for qualities in ([6] * size, [(0, 3, 6, 9, 11)[i % 5] for i in range(size)]):
        least, most = method.calls(make(qualities), first=True)
        assert least <= len(play(method, make(qualities)).calls) <= most


@every_method
def test_pairs_in_an_interval_cost_the_most(method):
    qualities = [0, 0, 2, 2, 5, 5, 8, 8] if isinstance(method, Listwise) else [0, 0, 2, 3, 5, 6, 8, 9]
    assert len(play(method, make(qualities)).calls) == method.calls(make(EIGHT), first=True)[1]


@every_method
@settings(max_examples=20)
@given(QUALITIES)
@example([None] * 3)
@example([3])
def test_the_first_questions_are_those_a_first_visit_begins_with(method, qualities):
    first = [question.prompt() for question in method.first_questions(make(qualities))]
    assert play(method, make(qualities)).prompts[: len(first)] == first


@every_method
def test_a_preflight_has_a_question_to_ask(method, scorer):
    made = scorer(scripted_judge(lambda messages: truth(messages[0]["content"])), method)
    made.first_question(QUERY)
    assert len(method.first_questions(stand_in(QUERY, 8))) >= 1
    assert made.store.totals().calls == 0


VARIANTS = (RankBuffer(anchor_content=False), RankBuffer(k0=7, fine=False))


@pytest.mark.parametrize(
    ("method", "most"),
    zip((*METHODS, *VARIANTS), (1, 1, 2, 2, 2, 2, 2, 9, 9, 12, 20, 8, 8, 8, 4, 9, 9, 16, 16, 8, 15), strict=True),
    ids=str,
)
def test_the_longest_prompt_shows_as_many_responses_as_the_method_says(method, most):
    """All eight rollouts share an interval. The visits are the first, the second, and one with `2 * k0` anchors."""
    assert method.most_shown(8) == most
    judge = scripted_judge(lambda messages: truth(messages[0]["content"]))
    after = asyncio.run(method.score(make([6] * 8), None, judge)).after
    asyncio.run(method.score(make([6] * 8), after, judge))
    if k0 := getattr(method, "k0", 0):
        anchors = tuple(Anchor(f"a{i}", f"{i}.a{i}", "initial", 0) for i in range(2 * k0))
        asyncio.run(method.score(make([6] * 8), AnchorBuffer(anchors), judge))
    assert max(len(SHOWN.findall(unguarded(messages[0]["content"]))) for messages in judge.client.seen) == most


# What holds for every method


def check(method, group: RolloutGroup, played) -> None:
    """Rewards in range, empty rollouts last and unasked, and the order that of the rewards."""
    assert len(played.rewards) == len(group.rollouts)
    if getattr(method, "bootstrap", False) and played.calls and played.calls[0].failed:
        assert set(played.rewards) == {None}, "there is no buffer yet, and the visit does not count"
        return
    for rollout, reward in zip(group.rollouts, played.rewards, strict=True):
        assert (reward == -1) if not rollout.text else reward is None or -1 <= reward <= 1
    known = {rollout.text for rollout in group.answered} | set(QUERY.responses)
    for prompt in played.prompts:
        assert set(SHOWN.findall(prompt)) <= known
        assert not re.search(r"\]\n(\n|\[)|\nRESPONSE\n\n|\nCANDIDATE\n\n", prompt), "nobody asks about an empty text"
    tiers = [{played.rewards[i] for i in tier} for tier in played.score.order]
    assert all(len(tier) == 1 for tier in tiers)
    levels = [level for tier in tiers for level in tier]
    assert levels == sorted(levels)
    ordered = [i for tier in played.score.order for i in tier]
    assert sorted(ordered) == [r.id for r in group.answered if played.rewards[r.id] is not None]


@every_method
@settings(max_examples=40)
@given(QUALITIES)
def test_a_faultless_judge_scores_every_rollout(method, qualities):
    group = make(qualities)
    played = play(method, group)
    check(method, group, played)
    assert None not in played.rewards
    if not group.answered:
        assert played.prompts == []


@every_method
@settings(max_examples=60)
@given(QUALITIES, CASES, st.sampled_from(["", "I cannot say.", '{"winner": "C", "score": 11, "position": -1}']))
def test_no_failure_breaks_a_group_or_becomes_a_score(method, qualities, case, nonsense):
    group = make(qualities)

    def answer(prompt):
        return nonsense if fails(case, "nonsense", *SHOWN.findall(prompt)) else faulty(case)(prompt)

    played = play(method, group, answer)
    check(method, group, played)
    if not any(call.failed for call in played.calls):
        assert None not in played.rewards


@every_method
@pytest.mark.parametrize("qualities", [EIGHT, (4, 4), (None, 3, None, 8), (1, 2, 3)])
def test_when_nothing_is_heard_nobody_is_scored(method, qualities):
    played = play(method, make(qualities), faulty((0, 1.0)))
    check(method, make(qualities), played)
    assert all(played.rewards[rollout.id] is None for rollout in make(qualities).answered)
    assert played.score.order == ()


@every_method
@settings(max_examples=40)
@given(QUALITIES)
def test_a_better_rollout_has_no_lower_reward(method, qualities):
    group = make(qualities, replace(QUERY, rubrics=QUERY.rubrics[:1]))
    rewards = play(method, group).rewards
    pairs = [(a.id, b.id) for a in group.answered for b in group.answered if quality(a.text) < quality(b.text)]
    if isinstance(method, Tournament):  # a better one may meet the best one early, and the best one may have byes
        n = len(group.answered)
        best = (
            {i for i in range(len(qualities)) if qualities[i] == max(q for q in qualities if q is not None)}
            if n
            else {}
        )
        pairs = [(a, b) for a, b in pairs if b in best] if n in (2, 4, 8) and len(best) == 1 else []
    for worse, better in pairs:
        may_tie = isinstance(method, RRCAGR) or getattr(method, "blocks_of_four", False)  # not all rollouts meet
        assert rewards[worse] <= rewards[better] if may_tie else rewards[worse] < rewards[better]


# Oracles


def rate(text: str, others: list[str], case, by_default: int = 0) -> Fraction | None:
    """Share of the completed comparisons won, half for a tie."""
    won = [
        Fraction((quality(text) > quality(other)) - (quality(text) < quality(other)) + 1, 2)
        for other in others
        if not fails(case, "Is high.", *sorted((text, other)))
    ]
    return (sum(won) + by_default) / (len(won) + by_default) if won else None


def scr_rates(group: RolloutGroup, case) -> dict[int, Fraction | None]:
    texts = {r.id: r.text for r in group.answered}
    return {
        i: rate(text, [t for j, t in texts.items() if j != i], case, len(group.empty)) for i, text in texts.items()
    }


def rrc_scr(group: RolloutGroup, case) -> dict:
    if len(group.answered) == 1:
        return {group.answered[0].id: 1 if group.empty else 0}
    return {i: None if r is None else 2 * r - 1 for i, r in scr_rates(group, case).items()}


def rrc_agr(group: RolloutGroup, case) -> dict:
    rates = {r.id: rate(r.text, list(group.query.responses), case) for r in group.answered}
    return {i: None if r is None else 2 * r - 1 for i, r in rates.items()}


def pairwise_rank(group: RolloutGroup, case) -> dict:
    if len(group.answered) == 1:
        return {group.answered[0].id: 0}
    rates = scr_rates(group, case)
    best_first = sorted((r for r in rates.values() if r is not None), reverse=True)
    n = len(best_first)
    return {
        i: None if r is None else Fraction(2 * (n - (best_first.index(r) + 1)), n - 1) - 1 for i, r in rates.items()
    }


def pointwise(group: RolloutGroup, case) -> dict:
    return {
        r.id: None if fails(case, "Is high.", r.text) else Fraction(2 * quality(r.text), 10) - 1
        for r in group.answered
    }


def gdpo(group: RolloutGroup, case) -> dict:
    rubrics, G = group.query.rubrics, len(group.rollouts)
    scored = [r for r in group.answered if not any(fails(case, rubric.text, r.text) for rubric in rubrics)]
    rewards = dict.fromkeys(r.id for r in group.answered)
    for r in scored:
        total = 0.0
        for rubric in rubrics:
            values = [RUBRICS[rubric.text](quality(each.text)) for each in scored] + [0] * len(group.empty)
            mean = sum(values) / len(values)
            variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
            total += rubric.weight / 7 * (RUBRICS[rubric.text](quality(r.text)) - mean) / (math.sqrt(variance) + 1e-4)
        rewards[r.id] = total * math.sqrt(G) / (G - 1) if G > 1 else 0
    return rewards


@pytest.mark.parametrize(
    ("method", "oracle"),
    [
        (Pointwise(), pointwise),
        (GDPO(), gdpo),
        (RRCSCR(), rrc_scr),
        (RRCSCR(seed=7), rrc_scr),
        (RRCAGR(), rrc_agr),
        (PairwiseRank(), pairwise_rank),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@settings(max_examples=100)
@given(QUALITIES, CASES)
@example([4] * 8, RIGHT)
@example([7], RIGHT)
@example([7, None], RIGHT)
def test_rewards_are_the_oracles(method, oracle, qualities, case):
    group = make(qualities)
    expected = oracle(group, case)
    rewards = play(method, group, faulty(case)).rewards
    for rollout in group.answered:
        if expected[rollout.id] is None:
            assert rewards[rollout.id] is None
        else:
            assert rewards[rollout.id] == pytest.approx(float(expected[rollout.id]), abs=1e-9)


@pytest.mark.parametrize("method", [Pointwise(), RRCSCR(), RRCAGR(), PairwiseRank(), ArenaRL()], ids=str)
def test_a_rollout_nobody_hears_about_is_unscored_and_the_others_are_as_without_it(method):
    def deaf(prompt):
        return TransportError("refused") if "\n3.r2\n" in prompt else truth(prompt)

    rewards = play(method, make([5, 9, 3, None, 1]), deaf).rewards
    without = list(play(method, make([5, 9, None, 1])).rewards)
    assert rewards == (without[0], without[1], None, without[2], without[3])


# Pairwise Rank's ranks


@pytest.mark.parametrize(
    ("qualities", "rewards"),
    [
        ([9, 9, 2], (1, 1, -1)),  # ranks 1, 1, 3
        ([9, 2, 2], (1, 0, 0)),  # 1, 2, 2
        ([9, 9, 2, None], (1, 1, -1, -1)),
        ([3, 9, 5, 1], (-1 / 3, 1, 1 / 3, -1)),
        ([4, 4, 4, 4], (1, 1, 1, 1)),  # all first
        ([4], (0,)),
        ([4, None, None], (0, -1, -1)),
    ],
)
def test_equal_win_rates_share_the_first_rank_they_occupy(qualities, rewards):
    assert play(PairwiseRank(), make(qualities)).rewards == pytest.approx(rewards)


def test_a_tie_is_half_a_win_for_each():
    assert play(RRCSCR(), make([5, 5, 1])).rewards == pytest.approx((0.5, 0.5, -1))
    assert play(RRCAGR(), make([4, 11, 0])).rewards == pytest.approx((2 * 2.5 / 7 - 1, 1, -1))


# Loading a method by name


@dataclass(frozen=True)
class Shortlist:
    """A new method: one listwise ranking of the group, by rank. All that a method needs is in this class."""

    worst_is: float = -1.0
    name = "shortlist"
    responses_needed = 0

    async def score(self, group, buffer, judge):
        empty = [rollout.id for rollout in group.empty]
        order = await judge.ask(*self.first_questions(group)) if group.answered else []
        tiers = tuple((i,) for i in order or ())
        rewards = rank_rewards(tiers, len(group.rollouts), empty)
        return GroupScore(tuple(r if r is None else max(r, self.worst_is) for r in rewards), tiers)

    def most_shown(self, G):
        return G

    def calls(self, group, first):
        return bool(group.answered), bool(group.answered)

    def first_questions(self, group):
        return [ranking_question(group.query, group.answered, kind="shortlist")]


def test_what_rankbuffer_needs_and_costs():
    assert (RankBuffer(k0=5).responses_needed, RankBuffer(k0=5, bootstrap=True).responses_needed) == (5, 0)
    assert RankBuffer().calls(make(EIGHT), first=True) == (8, 12)
    assert RankBuffer(fine=False).calls(make(EIGHT), first=True) == (8, 8)
    assert play(RankBuffer(), make([2, 3])).score.fine_ranked, "both lie between the same anchors"
    assert not play(RankBuffer(), make([0, 3])).score.fine_ranked


FILES = {
    path.stem: module.METHOD
    for path in sorted((ROOT / "rankbuffer_trl" / "rewards").glob("*.py"))
    if hasattr(module := importlib.import_module(f"rankbuffer_trl.rewards.{path.stem}"), "METHOD")
}


def test_every_method_of_the_paper_has_a_file():
    assert set(FILES.values()) == {type(method) for method in METHODS}


@pytest.mark.parametrize("name", FILES)
def test_a_method_loads_by_the_name_of_its_file(name):
    method = load_method(name, {}, seed=5)
    assert type(method) is FILES[name]
    assert method.name == name, "the ledger says what the recipe says"
    assert dataclasses.is_dataclass(method)
    if fields := dataclasses.fields(method):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, fields[0].name, 1)
    if any(field.name == "seed" for field in fields):
        assert method.seed == 5
        assert load_method(name, {"seed": 2}, seed=5).seed == 2
    assert load_method(f"{type(method).__module__}.{type(method).__name__}", {}, seed=5) == method


def test_arguments_reach_the_method():
    assert load_method("tournament", {"repeats": 5}, seed=1) == Tournament(seed=1, repeats=5)
    assert load_method("rrc_agr", {"references": 3}, seed=0).responses_needed == 3
    assert load_method("llm_buffer", {"look_ahead": True}, seed=0) == LLMBuffer(look_ahead=True)
    assert load_method("test_methods.Shortlist", {"worst_is": 0.0}, seed=9) == Shortlist(0.0)


@pytest.mark.parametrize(
    "name",
    ["elo", "", ".", "..groups", "format", "method", "pointwise.Pointwise", "test_methods.Longlist", "no.such.Method"]
    + ["test_methods.EIGHT", "json.loads", "rankbuffer_trl.groups"],
)
def test_an_unknown_method_is_named(name):
    with pytest.raises(ValueError, match=f"(?s){re.escape(repr(name))}.*rankbuffer"):
        load_method(name, {}, seed=0)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("tournament", {"rounds": 2}, "tournament has no argument 'rounds'; it has seed, repeats"),
        ("pointwise", {"seed": 2}, "pointwise has no argument 'seed'; it has none"),
        ("test_methods.Shortlist", {"K": 2}, "test_methods.Shortlist has no argument 'K'; it has worst_is"),
        ("tournament", {"repeats": 0}, "repeats must be at least 1, got 0"),
        ("rrc_agr", {"references": 0}, "references must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_named(name, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_method(name, arguments, seed=0)


@dataclass(frozen=True)
class Typed:
    """Arguments of every kind that a recipe can be checked for, and some that it cannot."""

    needed: int
    flag: bool = False
    share: float = 0.5
    word: str = ""
    mode: Literal["a", 1] = "a"
    limit: Optional[float] = None  # noqa: UP045  # this form too
    either: int | str | None = None
    ours: "tuple[int, ...] | int" = ()
    made: int = field(default=0, init=False)
    elsewhere: "list[str]" = field(default_factory=list)
    seed: int = 0
    name = "typed"
    responses_needed = 0
    score = calls = most_shown = first_questions = Shortlist.score


MEMBERS = ("name", "responses_needed", "score", "calls", "most_shown", "first_questions")
NUMBERS = st.sampled_from([0, 4, -1, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf])
VALUES = NUMBERS | st.sampled_from([True, False, None, "", "4", "false", "a", [], (), [1], ["a"], ["a", 1], {}])


def suits(key: str, value) -> bool:
    """Whether `value` is right for an argument of `Typed`, said once more."""
    kind = type(value)
    number = (kind is float and math.isfinite(value)) or (kind is int and value != 10**400)
    return {
        "needed": kind is int,
        "seed": kind is int,
        "flag": kind is bool,
        "share": number,
        "word": kind is str,
        "mode": (kind is str and value == "a") or (kind is int and value == 1),
        "limit": number or value is None,
        "either": kind in (int, str) or value is None,
        "elsewhere": kind in (list, tuple) and all(type(item) is str for item in value),
    }.get(key, True)


ARGUMENTS = [each.name for each in dataclasses.fields(Typed) if each.init]


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(ARGUMENTS), VALUES))
def test_a_value_reaches_a_method_only_if_it_fits_the_annotation(arguments):
    arguments = {"needed": 1} | arguments
    wrong = [key for key, value in arguments.items() if not suits(key, value)]
    if wrong:
        with pytest.raises(
            SettingsError, match=r"^method_args: test_methods\.Typed needs .* for '\w+', got "
        ) as caught:
            load_method("test_methods.Typed", arguments, seed=5)
        assert re.search(r" for '(\w+)', got", str(caught.value))[1] in wrong
    else:
        method = load_method("test_methods.Typed", arguments, seed=5)
        assert all(getattr(method, key) is value for key, value in ({"seed": 5} | arguments).items())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rankbuffer", {"bootstrap": "false"}, "rankbuffer needs true or false for 'bootstrap', got 'false'"),
        ("rankbuffer", {"bootstrap": 0}, "rankbuffer needs true or false for 'bootstrap', got 0"),
        ("rankbuffer", {"k0": 4.5}, "rankbuffer needs an integer for 'k0', got 4.5"),
        ("rankbuffer", {"k0": "4"}, "rankbuffer needs an integer for 'k0', got '4'"),
        ("rankbuffer", {"k0": math.nan}, "rankbuffer needs an integer for 'k0', got nan"),
        ("rankbuffer", {"k0": True}, "rankbuffer needs an integer for 'k0', got True"),
        ("rankbuffer", {"k0": None}, "rankbuffer needs an integer for 'k0', got None"),
        ("rankbuffer", {"k0": 1}, "k0 must be at least 2, got 1"),
        ("tournament", {"seed": "x"}, "tournament needs an integer for 'seed', got 'x'"),
        ("test_methods.Shortlist", {"worst_is": math.inf}, "needs a finite number for 'worst_is', got inf"),
        ("test_methods.Typed", {}, "test_methods.Typed needs a value for 'needed'"),
        ("test_methods.Typed", {"needed": 1, "made": 2}, "has no argument 'made'; it has needed, flag"),
        ("test_methods.Typed", {"needed": 1, "mode": True}, "needs one of 'a', 1 for 'mode', got True"),
        ("test_methods.Typed", {"needed": 1, "limit": "x"}, "needs a finite number or null for 'limit', got 'x'"),
    ],
)
def test_a_value_that_does_not_fit_is_named(name, arguments, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_method(name, arguments, seed=0)


def test_an_annotation_that_cannot_be_evaluated_is_left_to_the_class():
    members = {member: getattr(Shortlist, member) for member in MEMBERS}
    fields = [("size", "Missing"), ("k0", int, 4)]
    unknown = dataclasses.make_dataclass("Unknown", fields, namespace=members, frozen=True)
    globals()["Unknown"] = unknown
    assert load_method("test_methods.Unknown", {"size": "any"}, seed=0) == unknown("any")
    with pytest.raises(SettingsError, match="an integer for 'k0'"):
        load_method("test_methods.Unknown", {"size": "any", "k0": "4"}, seed=0)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_method_that_lacks_a_member_is_refused(member, monkeypatch):
    assert load_method("test_methods.Shortlist", {}, seed=0) == Shortlist()
    monkeypatch.delattr(Shortlist, member)
    with pytest.raises(SettingsError, match=f"'test_methods.Shortlist' has no {member}: add to the class what"):
        load_method("test_methods.Shortlist", {}, seed=0)


def test_a_bug_in_a_methods_file_is_no_unknown_method(tmp_path, monkeypatch):
    (tmp_path / "buggy_method.py").write_text("len(1)")
    (tmp_path / "incomplete_method.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match="has no len"):
        load_method("buggy_method.Method", {}, seed=0)
    with pytest.raises(SettingsError, match="No module named 'no_such_package'"):
        load_method("incomplete_method.Method", {}, seed=0)


def test_a_typo_in_a_methods_name_lists_the_methods():
    with pytest.raises(SettingsError, match="rankbufer") as caught:
        load_method("rankbufer", {}, seed=0)
    assert f"set `method` to one of {', '.join(FILES)}, or to" in str(caught.value)


def test_a_new_method_runs_through_the_scorer_and_names_itself_in_the_ledger(scorer):
    made = scorer(scripted_judge(lambda messages: truth(messages[0]["content"])), Shortlist())
    outcome = made.score([make([3, 1, None, 2]), make([None] * 4, replace(QUERY, id="empty"))], step=0)
    assert outcome.scores[0].rewards == pytest.approx((1, -1 / 3, -1, 1 / 3))
    assert outcome.scores[1].rewards == (-1,) * 4
    assert list(made.store.rows("SELECT method, kind, outcome FROM calls")) == [("shortlist", "shortlist", "parsed")]


@every_method
def test_every_method_runs_through_the_scorer(method, scorer):
    made = scorer(scripted_judge(lambda messages: truth(messages[0]["content"])), method)
    for step in range(2):
        group = replace(make([7, 3, None, 9], step=step), epoch=step)
        outcome = made.score([group], step)
        assert outcome.scores[0].rewards[2] == -1 and outcome.scores[0].rewards[3] == max(outcome.scores[0].rewards)
        kept = made.store.load("q")
        assert (kept is not None) == hasattr(method, "look_ahead") | isinstance(method, RankBuffer)
    kinds = {
        "pointwise": {"score"},
        "gdpo": {"rubric"},
        "arenarl": {"duel"},
        "rankbuffer": {"insert", "bootstrap"},
        "llm_buffer": {"insert", "manage"},
        "rankbuffer_batch": {"batch"},
        "listwise": {"look", "again"},
        "rankbuffer_looks": {"insert", "bootstrap"},
    }
    found = list(made.store.rows("SELECT DISTINCT method, kind FROM calls"))
    assert {name for name, _ in found} == {method.name}
    assert {kind for _, kind in found} - {"fine"} <= kinds.get(method.name, {"pair"})
