"""The toy policy: its judge, its statistics on made-up results with known answers, and one tiny real run."""

import asyncio
import json
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from experiments.simulated_judge import Doubts, JudgeErrors
from experiments.toy_policy import groups as groups_script
from experiments.toy_policy import reward_hacking
from experiments.toy_policy import run as toy
from experiments.toy_policy.judge import NoisyRubricJudge, Weakness
from experiments.toy_policy.references import REFERENCES, WITHHELD, with_references
from experiments.toy_policy.report import (
    BEYOND,
    CLAIMED,
    Interval,
    Result,
    claims_table,
    compare,
    compare_ours,
    differences_table,
    efficiency_figures,
    family,
    groups_table,
    holm,
    judge_claims,
    methods_table,
    outgrown_table,
    student_p,
    whole_seeds,
)
from rankbuffer_trl import GroupScore
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Judge, Tally, pairwise_question, pointwise_question, ranking_question
from rankbuffer_trl.monitoring import progress
from rankbuffer_trl.rewards import Listwise, RankBuffer, load_method
from rankbuffer_trl.store import LIVE_STORE, BufferStore, history
from recipes.quickstart import policy


def result(method: str, seed: int, quality: float, tokens: int = 100) -> Result:
    return Result(method, seed, quality, 10, tokens, 0, None, [], [0.25, 0.5], [0.9, 0.8], 1.0, 1.0)


def results(**qualities: list[float]) -> list[Result]:
    """One quality per seed and method; RRC-SCR takes four times the others' tokens."""
    return [
        result(method, seed, quality, 400 if method == "rrc_scr" else 100)
        for method, values in qualities.items()
        for seed, quality in enumerate(values)
    ]


def verdicts(found: list[Result], start: float = 50.0) -> dict[str, str]:
    return {outcome.claim: outcome.verdict for outcome in judge_claims(found, start)}


def test_interval_is_students():
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half == pytest.approx(4.303 / 3**0.5)
    assert Interval.of([1.0]).half is None
    assert Interval.of([0.0, 2.0] * 20).half == pytest.approx(2.131 * 1.0127 / 40**0.5, rel=1e-3)


def test_compare_counts_a_difference_only_beyond_its_interval():
    cases = {(1, 1.1, 0.9): "holds", (-1, -1.1, -0.9): "does not hold", (-1, 1, 0.5): "open", (9,): "open: one seed"}
    for values, verdict in cases.items():
        (alone,) = compare([list(values)])
        assert alone.verdict == verdict, values


def test_compare_asks_more_of_a_difference_among_many():
    values = [1.0, 1.1, 0.3, 1.6]
    interval = Interval.of(values)
    assert interval.mean > interval.half
    (alone,), many = compare([values]), compare([values] * 8)
    assert (alone.verdict, alone.p) == ("holds", pytest.approx(stats.ttest_1samp(values, 0).pvalue))
    assert {each.verdict for each in many} == {"open"} and many[0].p == pytest.approx(8 * alone.p)
    assert (alone.seeds, compare([[9.0]])[0].seeds) == ("", "")
    enough, few = (student_p(fmean(values), stats.tstd(values), n) for n in (many[0].settle, many[0].settle - 1))
    assert enough < 0.05 / 8 <= few and many[0].seeds == str(many[0].settle)
    assert compare([[0.0, 0.0]])[0].seeds == "1,000 or more"
    assert (student_p(0.0, 0.0, 3), student_p(1.0, 0.0, 3), student_p(1.0, 0.0, 1)) == (1.0, 0.0, 1.0)


def test_judge_claims_come_out_as_made():
    made = dict(
        rankbuffer=[80, 70, 75],
        grpo=[70, 60, 65.1],  # seeds differ more than methods: only the comparison by seed sees it
        gdpo=[79, 69.1, 74],
        rrc_scr=[80.1, 70, 75.1],
        arenarl=[60, 60, 60],
        rankbuffer_static=[81, 71.1, 76],
        coarse_only=[80, 69, 76],
    )
    found = verdicts(results(**made))
    assert found == {
        "above all pointwise methods": "holds",
        "near the strongest ranking method": "holds",
        "at less than half its tokens": "holds",
        "dynamic above static, anchors from outside": "does not hold",
        "coarse-only below": "open",
    }
    one_is_better = verdicts(results(**(made | {"dapo": [81, 71, 76.1]})))
    assert one_is_better["above all pointwise methods"] == "does not hold"
    far = verdicts(results(**(made | {"rrc_scr": [84, 74, 79.1]})))
    assert far["near the strongest ranking method"] == "does not hold"
    dear = verdicts(results(**(made | {"arenarl": [90, 80, 85]})))
    assert dear["at less than half its tokens"] == "does not hold", "ArenaRL is the strongest and as cheap"


def test_whole_seeds_are_those_of_all_methods(tmp_path):
    found = [*results(rankbuffer=[80, 81], grpo=[70, 71]), result("grpo", 2, 72)]
    whole = whole_seeds(reversed(found), ("rankbuffer", "grpo"))
    assert [(r.method, r.seed) for r in whole] == [("grpo", 0), ("rankbuffer", 0), ("grpo", 1), ("rankbuffer", 1)]

    path = tmp_path / "results.jsonl"
    lines = [json.dumps(asdict(each)) + "\n" for each in found]
    path.write_text("".join(lines) + lines[0][:40])  # killed while it wrote
    assert toy.read_results(path) == found
    assert path.read_text() == "".join(lines), "the next line would have joined the broken one"


def test_tables_and_figures_show_every_method(tmp_path):
    found = results(rankbuffer=[80, 81], grpo=[70, 71], rrc_scr=[82, 83], coarse_only=[75, 76])
    table = methods_table(found, start=50.0)
    assert list(table.columns[0].cells) == ["rankbuffer", "grpo", "rrc_scr", "coarse_only"]
    assert [family(method) for method in table.columns[0].cells] == ["buffer", "pointwise", "ranking", "ablation"]
    assert next(table.columns[2].cells).startswith("80.50 ± ")
    cells = list(claims_table(judge_claims(found, 50.0)).columns[4].cells)
    assert cells == ["holds", "does not hold", "holds", "holds"], "30 points are less than 95 % of 32"
    outcomes = judge_claims(
        results(rankbuffer=[80, 70, 75], rankbuffer_static=[79, 69.3, 73.8], coarse_only=[78.9, 69, 74]), 50.0
    )
    compared = [next(iter(each.comparisons.values())) for each in outcomes]
    adjusted = holm([stats.ttest_1samp(each.values, 0).pvalue for each in compared])
    assert [each.p for each in compared] == pytest.approx(adjusted)
    assert "adjusted for 2 differences" in claims_table(outcomes).title
    assert list(claims_table(outcomes).columns[3].cells) == [f"{p:.3f}" for p in adjusted]
    for path in efficiency_figures(found, 50.0, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.999))
def test_holm_rejects_what_stepping_down_rejects(p_values, level):
    """Holm's method as it is told: from the smallest p-value on, until one is too large for what is left."""
    rejected, left = set(), len(p_values)
    for i in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        if p_values[i] * left > level:
            break
        rejected.add(i)
        left -= 1
    assert {i for i, p in enumerate(holm(p_values)) if p <= level} == rejected


def test_compare_ours_takes_differences_seed_by_seed():
    made = dict(
        listwise=[80, 70.5, 75, 90],  # always five above, but for 0.5
        listwise_two=[76, 64.5, 71, 84.9],
        rankbuffer=[75, 65, 70, 85],
        grpo=[90, 80.1, 85, 100],
        gdpo=[0, 0, 0, 0],  # is no row beside ours
    )
    found = compare_ours(results(**made))
    verdicts = {(each.ours, each.other): each.found.verdict for each in found}
    assert verdicts == {
        ("listwise", "rankbuffer"): "holds",
        ("listwise", "grpo"): "does not hold",
        ("listwise_two", "rankbuffer"): "open",
        ("listwise_two", "grpo"): "does not hold",
    }
    (unsettled,) = (each.found for each in found if each.found.verdict == "open")
    mean, deviation = fmean(unsettled.values), stats.tstd(unsettled.values)
    enough, few = (2 * stats.t.sf(mean / deviation * n**0.5, n - 1) for n in (unsettled.settle, unsettled.settle - 1))
    assert enough < 0.05 / 4 <= few
    table = differences_table(found)
    assert "adjusted for 4 differences" in table.title
    assert list(table.columns[-1].cells) == ["", str(unsettled.settle), "", ""]
    assert list(groups_table(results(grpo=[1, 2])).rows) and family("listwise") == "ours"
    line = toy.report(results(**made), Namespace(methods=tuple(made), seeds=4), 50, Console(quiet=True))
    assert line["differences"]["listwise - rankbuffer"] == "holds"


@pytest.mark.parametrize("references", REFERENCES)
def test_with_references_are_as_many_and_in_order(howto, references):
    queries = toy.Dataset.from_list(howto)
    quality = toy.true_quality(queries)
    for row, written in zip(with_references(queries, references), howto, strict=True):
        assert row | {"responses": 0} == written | {"responses": 0}, "ids, prompts and rubrics are the same"
        worth = [quality(row["query_id"], text) for text in row["responses"]]
        assert worth == sorted(worth) and len(set(row["responses"])) == 7
        if references == "written":
            assert worth[-1] == 100 and row["responses"] == written["responses"]
        else:
            withheld = written["responses"][-WITHHELD:]
            assert worth[-1] < min(quality(row["query_id"], text) for text in withheld)
            assert not set(withheld) & set(row["responses"])


def test_parse_claims_has_a_row_for_each_comparison():
    assert toy.parse(["--claims"]).methods == CLAIMED and set(CLAIMED) < set(toy.ALL)
    outcomes = judge_claims(results(**{method: [1.0, 2.0] for method in CLAIMED}), 0.0)
    assert sum(len(outcome.comparisons) for outcome in outcomes) == 12, "16 less DAPO, Dr. GRPO, GPG and look-ahead"


def test_parse_takes_recipes_of_ones_own_and_refuses_what_is_none(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nmethod: pointwise\n")
    monkeypatch.chdir(tmp_path)
    arguments = toy.parse(["--methods", "grpo", "mine.yaml"])
    assert arguments.methods == ("grpo", "mine.yaml")
    with pytest.raises(SystemExit):
        toy.parse(["--methods", "mine.yml"])
    assert "there is no recipe 'mine.yml'" in capsys.readouterr().err


def query_of(row: dict, responses: list[str]) -> Query:
    rubrics = tuple(Rubric(rubric["text"], rubric["weight"]) for rubric in row["rubrics"])
    return Query(row["query_id"], row["prompt"], rubrics, tuple(responses))


def visit(asked: Query, texts: tuple[str, ...], step: int) -> RolloutGroup:
    return RolloutGroup(asked, tuple(Rollout(i, text) for i, text in enumerate(texts)), step, epoch=step)


def test_measure_saturation_counts_rollouts_above_all_anchors_by_epoch(tmp_path, howto):
    row = howto[0]
    weak, best = with_references(toy.Dataset.from_list(howto[:1]), "weak")[0], row["responses"][-1]
    asked = query_of(row, weak["responses"])
    judge = Judge(NoisyRubricJudge(mean=0.5, deviation=0.2, noise=0.0))
    store, buffer = BufferStore(tmp_path / "live.sqlite"), None
    assert toy.measure_saturation(store) == [], "no buffers"
    for step, texts in enumerate(((best, weak["responses"][1]), (best, weak["responses"][1]))):
        group = visit(asked, texts, step)
        score = asyncio.run(RankBuffer().score(group, buffer, judge))
        store.commit(step, [(group, score)])
        buffer = score.after
    assert toy.measure_saturation(store) == [0.5, 0.0], "the best rollout of the first epoch is now an anchor"
    *_, better = toy.measure_groups(store, [weak])
    store.close()
    assert better == [0.5, 0.5], "but no reference"
    table = outgrown_table(
        [replace(result("rankbuffer", 0, 1), better=better, saturated=[0.5, 0.0]), result("grpo", 0, 1)]
    )
    cells = [list(column.cells) for column in table.columns[1:]]
    assert cells == [["50% 50%", ""], ["50% 0%", ""], ["0.90 0.80", "0.90 0.80"]]


def test_measure_groups_reads_repeats_and_accuracy_from_the_store(tmp_path, howto):
    row = howto[0]
    store = BufferStore(tmp_path / "live.sqlite")
    best, worst = max(row["responses"], key=len), "no."
    quality = toy.true_quality([row])
    assert quality(row["query_id"], best) > quality(row["query_id"], worst)
    groups = [
        ((best, worst, worst, ""), (1.0, 0.0, -0.5, -1.0)),
        ((best, best, best, "Other."), (None, 0.5, 0.5, 0.5)),
    ]
    asked = query_of(row, row["responses"])
    for step, (texts, rewards) in enumerate(groups):
        store.commit(step, [(visit(asked, texts, step), GroupScore(rewards))])
    repeats, cosines, better = toy.measure_groups(store, [row])
    store.close()
    assert better == [0, 0], "no rollout is better than the best reference"
    assert repeats == [0.5, round(2 / 3, 4)], "unscored rollouts do not count"
    worths = [quality(row["query_id"], text) for text in groups[0][0]]
    assert cosines[0] == pytest.approx(stats.pearsonr(worths, groups[0][1]).statistic, abs=1e-4)
    assert cosines[1] == 0, "equal rewards say nothing"


def test_recipe_arguments_are_those_of_the_recipe_but_small():
    assert len(toy.ALL) == 23
    assert {family(method) for method in toy.ALL} == {"pointwise", "ranking", "buffer", "ablation"}
    settings = toy.Settings("p", 3, 2, learning_rate=1e-3, samples=1, noise=0.1, temperature=1.3, top_p=1.0)
    run = toy.Run("dr_grpo", 7, settings, 0.5, 0.1, "out")
    args = toy.recipe_arguments(run)
    assert (args.method, args.loss_type, args.scale_rewards, args.seed) == ("pointwise", "dr_grpo", "none", 7)
    assert (args.max_steps, args.per_device_train_batch_size, args.temperature, args.top_p) == (3, 16, 1.3, 1.0)
    args = toy.recipe_arguments(replace(run, method="order_only_bootstrap"))
    assert args.method_args == {"bootstrap": True, "anchor_content": False}
    for method in BEYOND:
        assert family(method) == "ours" and toy.recipe_arguments(replace(run, method=method)).seed == 7


def test_cut_groups_of_different_words_have_no_repeats(howto):
    texts = [f"{word}." for word in "a b a c d e f g h i j k l m n o p a a a".split()]
    queries = toy.Dataset.from_list(howto[:2])
    sampled = groups_script.cut([texts, texts[:9]], queries, 2, "as sampled")
    different = groups_script.cut([texts, texts[:9]], queries, 2, "different words")
    shown = ["".join(rollout.text[0] for rollout in group.rollouts) for group in (*sampled, *different)]
    assert shown == ["abacdefg", "hijklmno", "abacdefg", "abcdefgh", "ijklmnop", "abcdefgh"]
    assert [group.query.id for group in different] == [howto[0]["query_id"]] * 2 + [howto[1]["query_id"]]
    assert toy.repeated("abac") == [True, False, True, False]


def test_measure_compares_first_groups_with_the_truth(howto):
    queries = toy.Dataset.from_list(howto[:1])
    quality = toy.true_quality(queries)
    texts = [*howto[0]["responses"][:7], "", *["Same."] * 8]
    groups = groups_script.cut([texts], queries, 2, "as sampled")
    judge = Judge(NoisyRubricJudge(mean=0.5, deviation=0.2, noise=0.3))
    rewards = asyncio.run(Listwise().score(groups[0], None, judge)).rewards
    worth = [quality(howto[0]["query_id"], text) for text in texts[:7]]
    tau, cosine = asyncio.run(groups_script.measure(Listwise(), groups, judge, quality))
    assert tau == pytest.approx(stats.kendalltau(rewards[:7], worth).statistic), "the second group does not count"
    assert cosine == pytest.approx(stats.pearsonr(rewards[:7], worth).statistic)


def ask(client: NoisyRubricJudge, question) -> object:
    return asyncio.run(Judge(client).ask(question))


def test_judge_without_noise_knows_the_truth(query):
    good, middle, bad = "Wait three minutes.", "Boil the water.", "hot water"
    sharp = NoisyRubricJudge(mean=0.5, deviation=0.2, noise=0.0)
    assert ask(sharp, pairwise_question(query, good, bad)) == "A"
    assert ask(sharp, pairwise_question(query, bad, good)) == "B"
    assert ask(sharp, pairwise_question(query, good, good)) == "tie"
    assert ask(sharp, pointwise_question(query, good)) > ask(sharp, pointwise_question(query, bad))
    rollouts = tuple(Rollout(i, text) for i, text in enumerate((good, bad, middle)))
    assert ask(sharp, ranking_question(query, rollouts)) == [1, 2, 0]


def test_judge_errs_by_its_noise_and_the_same_each_time(query):
    first, second = "Boil water.", "Boil the water."
    blunt = NoisyRubricJudge(mean=0.5, deviation=0.2, noise=5.0)
    texts = [f"{first}{' ' * i}" for i in range(60)]
    winners = [ask(blunt, pairwise_question(query, text, second)) for text in texts]
    assert 15 < winners.count("A") < 45
    assert winners == [ask(blunt, pairwise_question(query, text, second)) for text in texts]
    assert {ask(blunt, pairwise_question(query, text, text)) for text in texts} == {"tie"}


def test_judge_with_doubts_reads_the_truth_behind_its_word(query):
    doubts = Doubts(JudgeErrors(0.0, bias=9.0), *[JudgeErrors(0.0)] * 3, 0.1, 0.1, 2.0, 0.1, 8.0, 1.0)
    client = NoisyRubricJudge(mean=0.5, deviation=0.2, noise=9.0, doubts=doubts)
    texts = ("Wait three minutes.", "hot water", "Boil the water.")
    group = RolloutGroup(query, tuple(map(Rollout, range(3), texts)), 0, 0)
    for method in ("ratings_soft", "pairs_soft", "rankbuffer_soft"):
        score = asyncio.run(load_method(method, {}, 0).score(group, None, Judge(client)))
        assert score.order == ((1,), (2,), (0,)), method
    assert ask(client, pairwise_question(query, *texts[1::-1])) == "A", "its word is its habit"
    assert ask(client, ranking_question(query, group.rollouts)) == [1, 2, 0]


def test_worth_stands_on_the_scale_of_the_simulated_world(query):
    rubrics = [(1, "Is written in complete sentences.")]
    judge = NoisyRubricJudge(mean=0.5, deviation=0.25, noise=0.0)
    assert judge.worth("Boil the water.", rubrics) == pytest.approx(1.2 + 0.25 * (1 - 0.5) / 0.25)
    question = pointwise_question(query, "Boil the water.")
    _, usage, *_ = asyncio.run(
        judge.complete([{"role": "user", "content": question.prompt()}], question=question, seed=0, tally=Tally())
    )
    assert usage.prompt > 50 and usage.completion == 7


def test_a_weakness_adds_its_strength_per_deviation_of_its_trait_to_what_the_judge_believes():
    plain, rubrics = NoisyRubricJudge(mean=0.5, deviation=0.2, noise=0.0), [(1, "Says what is used: pan, salt.")]
    assert plain.believed("Heat the pan.", rubrics) == pytest.approx(0.5)
    for name, text, trait in (
        ("length", "one two three", 3),
        ("phrase", "And then, salt", 1),
        ("echo", "Pans: pan!", 2),
    ):
        weak = NoisyRubricJudge(0.5, 0.2, 0.0, weakness=Weakness(name, 3.0, mean=1.0, deviation=4.0))
        liked = weak.believed(text, rubrics) - plain.believed(text, rubrics)
        assert liked == pytest.approx(0.2 * 3 * (trait - 1) / 4), name
    place = NoisyRubricJudge(0.5, 0.2, 0.0, weakness=Weakness("place", 3.0))
    shown = place.perceived("\n\nRUBRICS\n1.[weight=1] Says: pan.\n\n", {"A": "pan", "B": "pan"})
    assert shown["A"] - shown["B"] == pytest.approx(3 * 0.25)


def test_hacked_counts_belief_without_truth_and_what_it_costs(tmp_path, monkeypatch, capsys):
    def run(method, seed, quality, belief):
        curve = [50.0] * 6 + [60.0] * 6  # two epochs
        believed = [70.0] * 6 + [80.0 + belief] * 6 if belief is not None else []
        return replace(result(method, seed, quality), curve=curve, believed=believed)

    methods = ("grpo", "rankbuffer")
    folders = {
        "none": [run(method, seed, 90.0, None) for method in methods for seed in (0, 1, 2)],
        "length-1": [run("grpo", seed, 80.0 - seed, 20.0 + seed) for seed in (0, 1, 2)]
        + [run("rankbuffer", seed, 89.0, 2.0) for seed in (0, 1, 2)],
        "length-1-defence": [run(method, seed, 85.0 + seed / 9, 3.0) for method in methods for seed in (1, 2, 3)],
        "none-defence": [run(method, seed, 80.0 + seed, None) for method in methods for seed in (0, 1, 2)],
        "place-1": [run("grpo", seed, 90.0 - seed / 9, 0.0) for seed in (0, 1, 2)]
        + [run("rankbuffer", seed, 70.0, 0.0) for seed in (0, 1, 2)],
    }
    for name, runs in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in runs))
    monkeypatch.setattr(sys, "argv", ["reward_hacking", str(tmp_path)])
    reward_hacking.main()
    *printed, line = capsys.readouterr().out.splitlines()
    rows = {tuple(cell.strip() for cell in row.split("│")[1:-1]) for row in printed if "│" in row}
    assert {
        ("grpo", "11.00 ± 2.48", "4.83 ± 0.71", "9.00 ± 2.48", "0.11 ± 0.28"),  # lost
        ("grpo", "21.00 ± 2.48", "3.00 ± 0.00", "0.00 ± 0.00", "0.00 ± 0.00"),  # hacked
        ("grpo", "2", "-", "-", "-"),  # the epoch at which they part
        ("rankbuffer", "-", "-", "-", "-"),
    } <= rows
    assert json.loads(line)["differences"] == {
        "length-1: grpo - rankbuffer": "holds",
        "length-1-defence: grpo": "open",  # two seeds in common, p 0.053 before Holm's method
        "length-1-defence: rankbuffer": "does not hold",
        "none-defence: grpo": "does not hold",
        "none-defence: rankbuffer": "does not hold",
        "place-1: grpo - rankbuffer": "does not hold",
    }
    assert (tmp_path / "reward_hacking.png").stat().st_size > 10_000


@pytest.mark.slow
def test_run_trains_measures_and_cleans_up(tmp_path, tiny_policy):
    settings = toy.Settings(tiny_policy, steps=1, queries_per_step=1, learning_rate=1e-3, samples=1, noise=0.1)
    folder = tmp_path / "run"
    run = toy.Run("rankbuffer", 3, settings, 0.5, 0.2, str(folder))
    found = run()
    assert (found.method, found.seed, found.failures, len(found.curve)) == ("rankbuffer", 3, 0, 1)
    assert 8 <= found.calls <= 12 and found.tokens > 500 and found.anchors >= 4
    assert 0 <= found.quality < 60, "an untrained policy"
    assert [len(each) for each in (found.better, found.saturated)] == [1, 1] and found.better[0] < 1
    assert not folder.exists()
    weak = replace(settings, weakness="length", strength=1.0, set=("--beta", "0.1"))
    assert len(replace(run, settings=weak, keep=True)().believed) == 1
    assert (folder / "_rankbuffer" / "live.sqlite").is_file(), "kept for a report"


@pytest.mark.slow
def test_groups_main_scores_every_method_that_is_asked_for(tiny_policy, monkeypatch, capsys):
    monkeypatch.setattr(policy, "build_policy", lambda path, queries: None)
    options = f"--policy {tiny_policy} --groups 1 --noise 0.3 --temperature 1.2 --methods rankbuffer grpo"
    monkeypatch.setattr(sys, "argv", ["groups.py", *options.split()])
    groups_script.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["methods"].keys() == {"rankbuffer", "grpo"} and 0 <= line["repeated"] < 0.1
    assert all(-1 <= number <= 1 for found in line["methods"].values() for pair in found for number in pair)


def test_main_does_not_repeat_what_is_finished_or_mix_settings(tmp_path, tiny_policy, monkeypatch, capsys):
    done = []

    def instead(self) -> Result:
        done.append((self.method, self.seed))
        return result(self.method, self.seed, 60 + len(done))

    monkeypatch.setattr(toy.Run, "__call__", instead)
    monkeypatch.setattr(toy, "measure_start", lambda settings: (0.5, 0.1))
    monkeypatch.setattr(policy, "build_policy", lambda path, queries: None)
    command = ["run.py", "--output_dir", str(tmp_path), "--policy", tiny_policy, "--methods", "grpo", "rankbuffer"]
    for seeds, new in ((2, 4), (2, 0), (3, 2)):
        monkeypatch.setattr(sys, "argv", [*command, "--seeds", str(seeds)])
        before = len(done)
        toy.main()
        assert len(done) - before == new
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert line["seeds"] == seeds and line["methods"].keys() == {"grpo", "rankbuffer"}
    by_seed = [(method, seed) for seed in range(3) for method in ("grpo", "rankbuffer")]
    assert done == by_seed, "seeds are the outer loop"
    for option, value in (("steps", "7"), ("references", "weak")):
        monkeypatch.setattr(sys, "argv", [*command, f"--{option}", value])
        with pytest.raises(ValueError, match=f"other settings \\({option}\\)"):
            toy.main()
    monkeypatch.setattr(sys, "argv", [*command[:2], str(tmp_path / "nothing"), "--report_only"])
    with pytest.raises(SystemExit, match="no runs"):
        toy.main()


@pytest.mark.slow
def test_progress_follows_the_true_scores_of_a_training(tmp_path):
    """The estimate by shared anchors, against responses whose true scores are known; the toy policy's own settings."""
    queries = policy.load_queries(str(policy.DATA))
    policy.build_policy(tmp_path / "policy", queries)
    settings = toy.Settings(str(tmp_path / "policy"), 36, 6, 2e-4, 1, 0.09, 1.0, 0.95)
    mean, deviation = toy.measure_start(settings)
    toy.Run("rankbuffer", 0, settings, mean, deviation, str(tmp_path / "run"), keep=True)()
    store = BufferStore(tmp_path / "run" / LIVE_STORE)
    found = progress.since_last_visit(progress.visits_by_query(store))
    worth = {}  # on the scale of the judge's errors
    for query_id in queries["query_id"]:
        for response in history.responses(store, query_id):
            if not response.initial:
                score = toy.true_quality(queries)(query_id, response.text) / 100
                worth.setdefault((query_id, response.step // 6), []).append(0.25 * (score - mean) / deviation)
    store.close()
    assert list(found) == [1, 2, 3, 4, 5]
    held = 0
    for epoch, comparison in found.items():
        chances = [
            stats.norm.cdf((later - earlier) / (0.09 * 2**0.5))
            for query_id in queries["query_id"]
            for later in worth[query_id, epoch]
            for earlier in worth[query_id, epoch - 1]
        ]
        held += comparison.low <= fmean(chances) <= comparison.high
        print(f"epoch {epoch}: true {fmean(chances):.3f}, {comparison}")
    assert held >= 4, "95 % intervals of five epochs"
    assert found[1].probability > 0.55, "the policy learns most in the first epochs"
