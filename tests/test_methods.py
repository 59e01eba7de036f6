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
from helpers.quality import CASES, EIGHT, QUALITIES, RIGHT
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_trl.buffer import Anchor, AnchorBuffer, select_k0
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import TransportError, ranking_question
from rankbuffer_trl.rewards._arenarl import ArenaRL
from rankbuffer_trl.rewards._gdpo import GDPO
from rankbuffer_trl.rewards._llm_buffer import LLMBuffer
from rankbuffer_trl.rewards._method import METHOD_MEMBERS, RewardMethod, load_method, score_by_order
from rankbuffer_trl.rewards._pairwise_rank import PairwiseRank
from rankbuffer_trl.rewards._pointwise import Pointwise
from rankbuffer_trl.rewards._prefetch import first_questions
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.rewards._rrc_agr import RRCAGR
from rankbuffer_trl.rewards._rrc_scr import RRCSCR
from rankbuffer_trl.rewards._tournament import Tournament
from rankbuffer_trl.rewards.beyond._listwise import Listwise
from rankbuffer_trl.rewards.beyond._pairs_soft import PairsSoft
from rankbuffer_trl.rewards.beyond._rankbuffer_soft import RankBufferSoft
from rankbuffer_trl.rewards.beyond._ratings_soft import RatingsSoft
from rankbuffer_trl.rewards.beyond._ruler import Ruler
from rankbuffer_trl.settings import RENAMED, say_renamed
from rankbuffer_trl.testing import QUERY, RESPONSE_LINES, RUBRICS, fails, faulty, make, play, quality, truth, unguarded
from rankbuffer_trl.training._first import first_question, stand_in
from rankbuffer_trl.training._state import differences

METHODS = (
    *(Pointwise(), GDPO(), Tournament(), RRCAGR(), RRCSCR(), PairwiseRank(), ArenaRL()),
    *(RankBuffer(), RankBuffer(bootstrap=True), LLMBuffer(), LLMBuffer(look_ahead=True)),
    *(Listwise(), Listwise(passes=4, rerank_disputed=False), Listwise(passes=1)),
    *(Listwise(rerank_disputed=False, block=3), Ruler(), RatingsSoft(), PairsSoft()),
    *(PairsSoft(orders=1, reward="strength"), RankBufferSoft(), RankBufferSoft(bootstrap=True)),
)
every_method = pytest.mark.parametrize("method", METHODS, ids=str)


# What a group costs


def test_calls_of_a_group_of_eight_are_what_the_paper_says():
    counts = (8, 8 * 3, 21, 56, 28, 28, 28, 8 + 3, 1, 8 + 3 + 1, 8 + 3, 2, 4, 1, 6, 1, 8, 8 * 7, 28, 8, 1)
    for method, count in zip(METHODS, counts, strict=True):
        assert len(play(method, make(EIGHT)).calls) == count, method  # 2 and 3, 5 and 6, 8 to 10 share an interval
        least, most = method.calls(make(EIGHT), first=True)
        assert least <= count <= most, method
        if not isinstance(method, LLMBuffer) and method not in (RankBuffer(), Listwise()):
            assert least == most, method
        pairs = [0, 0, 2, 2, 5, 5, 8, 8] if isinstance(method, Listwise) else [0, 0, 2, 3, 5, 6, 8, 9]
        assert len(play(method, make(pairs)).calls) == most, f"{method}: pairs in an interval cost the most"
    assert RankBuffer(fine=False).calls(make(EIGHT), first=True) == (8, 8)
    assert RankBuffer(bootstrap=True).calls(make(EIGHT[1:]), first=False) == (7, 10)


VARIANTS = (RankBuffer(anchor_content=False), RankBuffer(k0=7, fine=False))


def test_most_shown_is_what_the_longest_prompt_shows():
    """All eight rollouts share an interval. The visits are the first, the second, and one with `2 * k0` anchors."""
    most = (1, 1, 2, 2, 2, 2, 2, 9, 9, 12, 20, 8, 8, 8, 3, 8, 1, 2, 2, 9, 9, 8, 15)
    for method, shown in zip((*METHODS, *VARIANTS), most, strict=True):
        assert method.most_shown(8) == shown, method
        judge = scripted_judge(lambda messages: truth(messages[0]["content"]))
        after = asyncio.run(method.score(make([6] * 8), None, judge)).after
        asyncio.run(method.score(make([6] * 8), after, judge))
        if k0 := getattr(method, "k0", 0):
            anchors = tuple(Anchor(f"a{i}", f"{i}.a{i}", "initial", 0) for i in range(2 * k0))
            asyncio.run(method.score(make([6] * 8), AnchorBuffer(anchors), judge))
        prompts = [unguarded(messages[0]["content"]) for messages in judge.client.seen]
        assert max(len(RESPONSE_LINES.findall(prompt)) for prompt in prompts) == shown, method


# What holds for every method


def check(method, group: RolloutGroup, played) -> None:
    """Rewards in range, empty rollouts last and unasked, and the order that of the rewards."""
    assert len(played.rewards) == len(group.rollouts)
    for rollout, reward in zip(group.rollouts, played.rewards, strict=True):
        assert (reward == -1) if not rollout.text else reward is None or -1 <= reward <= 1
    known = {rollout.text for rollout in group.answered} | set(QUERY.responses)
    for prompt in played.prompts:
        assert set(RESPONSE_LINES.findall(prompt)) <= known
        empty = re.search(r"\]\n(\n|\[)|\nRESPONSE\n\n|\nCANDIDATE\n\n", prompt)
        assert not empty or isinstance(method, Tournament), "nobody else asks about an empty text"
    tiers = [{played.rewards[i] for i in tier} for tier in played.score.order]
    assert all(len(tier) == 1 for tier in tiers)
    levels = [level for tier in tiers for level in tier]
    assert levels == sorted(levels)
    ordered = [i for tier in played.score.order for i in tier]
    assert sorted(ordered) == [r.id for r in group.answered if played.rewards[r.id] is not None]


@every_method
@given(QUALITIES | st.integers(1, 9).map(lambda size: [6] * size))
@example([None] * 3)
@example([3])
@example([6] * 9)
@example([0, 3, 6, 9, 10, 0, 3, 6])
def test_score_of_a_faultless_judge_has_all_rewards_at_the_cost_that_calls_says(method, qualities):
    group = make(qualities)
    played = play(method, group)
    check(method, group, played)
    assert None not in played.rewards
    first = [question.prompt() for question in first_questions(method, group)]
    assert played.prompts[: len(first)] == first, "a first visit begins with these"
    least, most = method.calls(group, first=True)
    assert least <= len(played.calls) <= most
    n = len(group.answered)
    assert n or not played.calls
    exact = {"pointwise": n, "gdpo": 3 * n, "tournament": 3 * (len(qualities) - 1) * bool(n), "rrc_agr": 7 * n}
    exact |= {"rrc_scr": math.comb(n, 2), "pairwise_rank": math.comb(n, 2), "arenarl": 4 * max(n - 1, 0)}
    if method.name in exact:
        assert least == most == exact[method.name]


NONSENSE = st.sampled_from([None, "", "I cannot say.", '{"winner": "C", "score": 11, "position": -1}'])


@every_method
@given(QUALITIES, CASES, NONSENSE)
@example(list(EIGHT), (0, 1.0), None)
@example([4, None, 4], (0, 1.0), "")
def test_score_survives_failures_and_makes_no_reward_of_them(method, qualities, case, nonsense):
    group = make(qualities)

    def answer(prompt):
        lost = nonsense is not None and fails(case, "nonsense", *RESPONSE_LINES.findall(prompt))
        return nonsense if lost else faulty(case)(prompt)

    played = play(method, group, answer)
    check(method, group, played)
    if not any(call.failed for call in played.calls):
        assert None not in played.rewards
    if case[1] == 1:
        assert all(played.rewards[rollout.id] is None for rollout in group.answered), "nothing was heard"
        assert played.score.order == ()


@every_method
@given(QUALITIES)
def test_score_of_a_better_rollout_is_no_lower(method, qualities):
    group = make(qualities, replace(QUERY, rubrics=QUERY.rubrics[:1]))
    rewards = play(method, group).rewards
    if getattr(method, "block", None) and len(group.rollouts) > method.block:
        return  # a better one may be last in a list of better ones still
    pairs = [(a.id, b.id) for a in group.answered for b in group.answered if quality(a.text) < quality(b.text)]
    if isinstance(method, Tournament):  # a better one may meet the best one early, and the best one may have byes
        best = [rollout.id for rollout in group.answered if rollout.text.startswith(f"{best_quality(group)}.")]
        pairs = [(a, b) for a, b in pairs if [b] == best] if len(group.rollouts) in (2, 4, 8) else []
    for worse, better in pairs:
        not_all_meet = isinstance(method, RRCAGR)
        # 9 is the highest score of one, for a quality of 10 too; without doubts, the other ties intervals
        coarse = isinstance(method, RatingsSoft) or method == RankBufferSoft()
        assert rewards[worse] <= rewards[better] if not_all_meet or coarse else rewards[worse] < rewards[better]


def best_quality(group: RolloutGroup) -> int | None:
    return max((quality(rollout.text) for rollout in group.answered), default=None)


def test_score_of_every_method_goes_through_the_scorer(scorer):
    kinds = dict(pointwise="score", ratings_soft="score", gdpo="rubric", arenarl="duel", ruler="group")
    kinds |= dict(rankbuffer="insert bootstrap", rankbuffer_soft="insert bootstrap", llm_buffer="insert manage")
    kinds |= dict(listwise="look again")
    for method in {type(method): method for method in METHODS}.values():
        made = scorer(scripted_judge(lambda messages: truth(messages[0]["content"])), method)
        first_question(made, QUERY)
        assert made.store.totals().calls == 0
        assert len(first_questions(method, stand_in(QUERY, 8))) >= 1, f"{method}: a preflight has something to ask"
        for step in range(2):
            rewards = made.score([replace(make([7, 3, None, 9], step=step), epoch=step)], step).scores[0].rewards
            assert rewards[2] == -1 and rewards[3] == max(rewards), method
            kept = made.store.load("q")
            assert (kept is not None) == isinstance(method, LLMBuffer | RankBuffer), method
        found = list(made.store.rows("SELECT DISTINCT method, kind FROM calls"))
        assert {name for name, _ in found} == {method.name}
        assert {kind for _, kind in found} - {"fine"} <= {*kinds.get(method.name, "pair").split()}


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
    ranks = {i: None if r is None else best_first.index(r) + 1 for i, r in rates.items()}
    return {i: None if rank is None else Fraction(2 * (n - rank), n - 1) - 1 for i, rank in ranks.items()}


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


def test_gdpo_adds_the_score_of_a_fault_which_is_low_if_it_is_there():
    group, turned = make(EIGHT), tuple(replace(each, weight=-each.weight) for each in QUERY.rubrics[:1])
    faulty = replace(group, query=replace(QUERY, rubrics=turned + QUERY.rubrics[1:]))
    assert play(GDPO(), faulty).rewards == play(GDPO(), group).rewards


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
@given(QUALITIES, CASES)
@example([4] * 8, RIGHT)
@example([7], RIGHT)
@example([7, None], RIGHT)
@example([5, 9, 3, None, 1], (1, 0.5))
def test_rewards_are_the_oracles(method, oracle, qualities, case):
    group = make(qualities)
    expected = oracle(group, case)
    rewards = play(method, group, faulty(case)).rewards
    for rollout in group.answered:
        if expected[rollout.id] is None:
            assert rewards[rollout.id] is None
        else:
            assert rewards[rollout.id] == pytest.approx(float(expected[rollout.id]), abs=1e-9)


def test_rewards_of_ties_by_hand():
    """Equal win rates share the first rank that they occupy, and a tie is half a win for each."""
    for qualities, rewards in (
        ([9, 9, 2], (1, 1, -1)),  # ranks 1, 1, 3
        ([9, 2, 2], (1, 0, 0)),  # 1, 2, 2
        ([9, 9, 2, None], (1, 1, -1, -1)),
    ):
        assert play(PairwiseRank(), make(qualities)).rewards == pytest.approx(rewards)
    assert play(RRCSCR(), make([5, 5, 1])).rewards == pytest.approx((0.5, 0.5, -1))
    assert play(RRCAGR(), make([4, 11, 0])).rewards == pytest.approx((2 * 2.5 / 7 - 1, 1, -1))


def test_ruler_rewards_are_the_scores_of_one_prompt():
    assert play(Ruler(), make([5, None, 9])).rewards == pytest.approx((-0.9, -1, -0.82))
    assert play(Ruler(), make([5, None, 9]), lambda prompt: "no").rewards == (None, -1, None)
    played = play(Ruler(seed=3), make(EIGHT), lambda prompt: '{"scores": [0, 10, 20, 30, 40, 50, 60, 100]}')
    shown = [int(text.partition("r")[2]) for text in RESPONSE_LINES.findall(played.prompts[0])]
    assert [played.rewards[i] for i in shown] == pytest.approx([-1, -0.8, -0.6, -0.4, -0.2, 0, 0.2, 1])
    assert shown != sorted(shown), "the order of presentation is random"


# A buffer that outgrows its judge


def test_max_anchors_thins_what_the_update_leaves_and_changes_no_reward():
    method, plain, buffer, grown = RankBuffer(max_anchors=5), RankBuffer(), None, 0
    for step in range(4):
        group = replace(make([1, 2, 2, 6, 6, 6, 9, 10], step=step), epoch=step)
        score, expected = (play(each, group, buffer=buffer).score for each in (method, plain))
        assert score.rewards == expected.rewards
        assert score.after == replace(expected.after, anchors=tuple(select_k0(expected.after.anchors, 5)))
        buffer, grown = score.after, max(grown, len(expected.after))
    assert grown > 5 and (method.most_shown(3), plain.most_shown(3)) == (6, 9)
    with pytest.raises(SettingsError, match="max_anchors must be at least 4"):
        RankBuffer(max_anchors=3)


@pytest.mark.parametrize("method", [RankBuffer(), RankBuffer(static=True), RankBufferSoft()], ids=str)
def test_buffer_that_outgrows_the_judge_is_thinned_and_its_query_comes_back(method, caplog):
    buffer = AnchorBuffer(tuple(Anchor(f"a{i}", f"{i}.a{i}", "initial", 0) for i in range(9)))
    group = replace(make([2, 5, 7], step=4), epoch=4)

    def visit(most: int, error: str, buffer: AnchorBuffer):
        def answer(prompt):
            return TransportError(error) if len(RESPONSE_LINES.findall(prompt)) > most else truth(prompt)

        return play(method, group, answer, buffer)

    refused = "HTTP 400: This model's maximum context length is 64 tokens"
    lost = visit(9, refused, buffer)
    assert lost.rewards == (None,) * 3
    assert [anchor.id for anchor in lost.score.after.anchors] == ["a0", "a3", "a5", "a8"]
    (warning,) = caplog.messages
    assert "9 anchors of query 'q'" in warning and "max_anchors" in warning
    assert None not in visit(9, refused, lost.score.after).rewards
    assert visit(9, "connection refused", buffer).score.after == buffer.visited(), "it may answer later"
    assert len(visit(10, refused, buffer).score.after) >= 9 and len(caplog.messages) == 1


# Loading a method by name


@dataclass(frozen=True)
class Shortlist(RewardMethod):
    """A new method: one listwise ranking of the group, by rank. All that a method needs is in this class."""

    worst_is: float = -1.0
    name = "shortlist"

    async def score(self, group, buffer, judge):
        question = ranking_question(group.query, group.answered, kind="shortlist") if group.answered else None
        order = question and await judge.ask(question)
        score = score_by_order(group, [(i,) for i in order or ()])
        return replace(score, rewards=tuple(r if r is None else max(r, self.worst_is) for r in score.rewards))


FILES = {
    path.stem.lstrip("_"): module.METHOD
    for path in sorted((ROOT / "rankbuffer_trl" / "rewards").rglob("*.py"), key=lambda path: path.stem.lstrip("_"))
    if hasattr(module := importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), "METHOD")
}


def test_load_method_finds_a_method_by_the_name_of_its_file():
    assert set(FILES.values()) == {type(method) for method in METHODS}
    for name, cls in FILES.items():
        method = load_method(name, {}, seed=5)
        assert type(method) is cls
        assert method.name == name, "the ledger says what the recipe says"
        assert cls.__dataclass_params__.frozen
        assert load_method(f"{cls.__module__}.{cls.__name__}", {}, seed=5) == method
        if hasattr(method, "seed"):
            assert method.seed == 5
            assert load_method(name, {"seed": 2}, seed=5).seed == 2
    assert load_method("rrc_agr", {"references": 3}, seed=0).responses_needed == 3
    assert load_method("rankbuffer", {"k0": 5}, seed=0).responses_needed == 5
    assert load_method("rankbuffer", {"bootstrap": True}, seed=0).responses_needed == 0
    assert load_method("test_methods.Shortlist", {"worst_is": 0.0}, seed=9) == Shortlist(0.0)


def test_load_method_names_what_it_does_not_find():
    names = ["rankbufer", "", ".", "..groups", "format", "method", "pointwise.Pointwise", "test_methods.Longlist"]
    names += ["no.such.Method", "test_methods.EIGHT", "json.loads", "rankbuffer_trl.groups"]
    for name in names:
        with pytest.raises(SettingsError, match=re.escape(repr(name))) as caught:
            load_method(name, {}, seed=0)
        assert f"set `method` to one of {', '.join(FILES)}, or to" in str(caught.value)


@pytest.mark.parametrize("name", ["anchor_matches", "brpo", "rankbuffer_batch", "rankbuffer_looks"])
def test_load_method_says_that_a_method_was_removed_and_where_it_is(name):
    with pytest.raises(SettingsError, match=f"'{name}' was removed, .* commit e122f1a, the last one that has it"):
        load_method(name, {}, seed=0)


@dataclass(frozen=True)
class Glances(Pointwise):
    """A method of one's own with an argument that has the older name of another one."""

    looks: int = 1


def test_older_names_of_arguments_are_read_in_recipes_and_checkpoints_and_named_once(caplog):
    say_renamed.cache_clear()
    older, current = {"looks": 4, "again": False}, {"passes": 4, "rerank_disputed": False}
    assert older.keys() <= RENAMED.keys()
    assert load_method("listwise", older, seed=0) == load_method("listwise", current, seed=0)
    saved, now = ({"method": "listwise", "method_args": arguments} for arguments in (older, current))
    assert differences(saved, now) == differences(now, saved) == []
    (line,) = differences(saved, now | {"method_args": current | {"passes": 2}})
    assert line.startswith("method_args")
    lines = ["looks is called passes today", "again is called rerank_disputed today"]
    assert sorted(message.partition(";")[0] for message in caplog.messages) == sorted(lines), "each once"
    with pytest.raises(SettingsError, match="looks is an older name of passes, and both are set: leave looks out"):
        load_method("listwise", {"looks": 4, "passes": 4}, seed=0)
    assert load_method("test_methods.Glances", {"looks": 3}, seed=0) == Glances(3)


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
    score = calls = most_shown = Shortlist.score


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


@given(st.dictionaries(st.sampled_from(ARGUMENTS), VALUES))
def test_load_method_takes_a_value_only_if_it_fits_the_annotation(arguments):
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


def test_load_method_names_a_wrong_argument():
    for name, arguments, message in (
        ("tournament", {"rounds": 2}, "tournament has no argument 'rounds'; it has seed, repeats"),
        ("pointwise", {"seed": 2}, "pointwise has no argument 'seed'; it has none"),
        ("rankbuffer", {"k0": 1}, "k0 must be at least 2, got 1"),
        ("tournament", {"repeats": 0}, "repeats must be at least 1, got 0"),
        ("rrc_agr", {"references": 0}, "references must be at least 1, got 0"),
        *(("rankbuffer", {key: 0}, f"{key} must be at least 1, got 0") for key in ("prune_after", "refine_at")),
        ("rankbuffer", {"bootstrap": "false"}, "rankbuffer needs true or false for 'bootstrap', got 'false'"),
        ("rankbuffer", {"k0": 4.5}, "rankbuffer needs an integer for 'k0', got 4.5"),
        ("test_methods.Shortlist", {"worst_is": math.inf}, "needs a finite number for 'worst_is', got inf"),
        ("test_methods.Typed", {}, "test_methods.Typed needs a value for 'needed'"),
        (
            "test_methods.Typed",
            {"needed": 1, "made": 2},
            "no argument 'made' (did you mean mode?); it has needed",
        ),
        ("test_methods.Typed", {"needed": 1, "mode": True}, "needs one of 'a', 1 for 'mode', got True"),
        ("test_methods.Typed", {"needed": 1, "limit": "x"}, "needs a finite number or null for 'limit', got 'x'"),
    ):
        with pytest.raises(SettingsError, match=re.escape(message)):
            load_method(name, arguments, seed=0)


def test_load_method_leaves_an_annotation_that_cannot_be_evaluated_to_the_class():
    members = {member: getattr(Shortlist, member) for member in METHOD_MEMBERS}
    fields = [("size", "Missing"), ("k0", int, 4)]
    unknown = dataclasses.make_dataclass("Unknown", fields, namespace=members, frozen=True)
    globals()["Unknown"] = unknown
    assert load_method("test_methods.Unknown", {"size": "any"}, seed=0) == unknown("any")
    with pytest.raises(SettingsError, match="an integer for 'k0'"):
        load_method("test_methods.Unknown", {"size": "any", "k0": "4"}, seed=0)


def test_load_method_refuses_a_method_that_lacks_a_member(monkeypatch):
    """A class that derives from `RewardMethod` lacks a name and `score` at most."""
    for name, members in (("Shortlist", ("name", "score")), ("Typed", METHOD_MEMBERS)):
        for member in members:
            with monkeypatch.context() as patch:
                patch.delattr(globals()[name], member)
                with pytest.raises(SettingsError, match=f"'test_methods.{name}' has no {member}: derive its class"):
                    load_method(f"test_methods.{name}", {"needed": 1} if name == "Typed" else {}, seed=0)


def test_load_method_shows_a_bug_in_a_methods_file(tmp_path, monkeypatch):
    (tmp_path / "buggy_method.py").write_text("len(1)")
    (tmp_path / "incomplete_method.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match="has no len"):
        load_method("buggy_method.Method", {}, seed=0)
    with pytest.raises(SettingsError, match="No module named 'no_such_package'"):
        load_method("incomplete_method.Method", {}, seed=0)


def test_a_new_method_runs_through_the_scorer_and_names_itself_in_the_ledger(scorer):
    made = scorer(scripted_judge(lambda messages: truth(messages[0]["content"])), Shortlist())
    outcome = made.score([make([3, 1, None, 2]), make([None] * 4, replace(QUERY, id="empty"))], step=0)
    assert outcome.scores[0].rewards == pytest.approx((1, -1 / 3, -1, 1 / 3))
    assert outcome.scores[1].rewards == (-1,) * 4
    assert list(made.store.rows("SELECT method, kind, outcome FROM calls")) == [("shortlist", "shortlist", "parsed")]
