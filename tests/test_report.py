"""The page of a run: what it shows, hostile text, the files beside it, the card, the command."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from statistics import fmean

import conftest
import pytest
from conftest import QUICKSTART
from helpers.runs import HOSTILE, anchor_rows, record, record_hostile
from helpers.runs import score as score_steps
from helpers.runs import store_of_run as store_of_run
from huggingface_hub import ModelCard
from transformers import TrainerState

from rankbuffer_tools.report import browser, chart, page, report, tables
from rankbuffer_tools.report.browser import query_pages, visits_of
from rankbuffer_tools.report.chart import Chart, clean, column, panels, plain, thousands
from rankbuffer_tools.report.charts import advantage_chart, reach_chart, run_charts, score_chart
from rankbuffer_tools.report.command import main
from rankbuffer_tools.report.page import format_number, pack
from rankbuffer_tools.report.progress import Share
from rankbuffer_tools.report.report import examples_of, facts_of, headlines_of, judged_by_rubrics, write_report
from rankbuffer_tools.report.runs import Run, open_runs
from rankbuffer_trl.data._queries import DataError, QueryTable, load_queries
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Call, Usage
from rankbuffer_trl.monitoring._buffer_sizes import buffer_size_table
from rankbuffer_trl.monitoring._model_card import CardFacts, write_model_card
from rankbuffer_trl.monitoring.progress import visits_by_query, weigh
from rankbuffer_trl.rewards._method import GroupScore
from rankbuffer_trl.rewards._pointwise import Pointwise
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore, history
from rankbuffer_trl.store._places import COMPARE_FILE, DUEL_FILE, LIVE_STORE, REPORT

# What the browser shows


def test_visits_of_a_query_are_as_they_were(run, tmp_path):
    for number, method in enumerate((None, RankBuffer(bootstrap=True), Pointwise())):
        found = record(tmp_path / f"{number}.sqlite", epochs=2, method=method) if method else run
        store, next_of = BufferStore(found.path), {}
        for group, score in found.visits:
            next_of.setdefault(group.query.id, iter(visits_of(store, group.query.id)))
            visit = next(next_of[group.query.id])
            assert (visit["step"], visit["epoch"]) == (group.step, group.epoch)
            assert visit["before"] == anchor_rows(score.before) and visit["after"] == anchor_rows(score.after)
            has_none = bool(method) and (isinstance(method, Pointwise) or group.epoch == 0)
            assert (not visit["before"]) == has_none, method
            assert visit["positions"] == {str(id): p for id, p in score.positions.items()}
            assert visit["order"] == [list(tier) for tier in score.order]
            assert visit["rewards"] == list(score.rewards)
        assert not any(list(rest) for rest in next_of.values()), "no visit more"
        shown = examples_of(Run("run", store.path, store))
        assert [each["caption"] == "One of the queries that were visited twice." for each in shown] == [
            bool(method)
        ] * 3
        names = [chart.name for chart in run_charts(Run("run", store.path, store))]
        assert ("buffer_growth" in names) != isinstance(method, Pointwise) and "probes" in names
        store.close()


def test_query_pages_cut_texts_where_asked_and_measure_them_whole(store):
    queries = {f"q{i}": conftest.numbers(f"q{i}") for i in range(4)}
    pages = {index["id"]: page for index, page in query_pages(store, queries, lambda query_id, text: len(text), 1)}
    assert pages["q0"]["texts"]["initial-0"] == "1 […]" and pages["q0"]["quality"]["initial-0"] == 2
    assert pages["q0"]["visits"] == visits_of(store, "q0")
    assert pages["q0"]["prompt"] == "?" and pages["q0"]["rubrics"] == [{"text": "Is high.", "weight": 1}]


# The page and its files


class Tags(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "</script><b>$x$ &amp; 'run'" / LIVE_STORE
    record_hostile(path)
    return write_report([path.parent.parent], folder / "out").read_text(encoding="utf-8")


def test_the_page_has_nothing_that_a_policy_wrote_as_markup(hostile_page):
    seen = Tags(hostile_page)
    scripts = [attrs for tag, attrs in seen.tags if tag == "script"]
    packed = [{"type": "application/octet-stream", "id": id} for id in ("advantages-data", "run-data-0")]
    assert scripts == [*packed, {}]
    assert not [tag for tag, _ in seen.tags if tag in ("img", "b", "iframe", "object", "base", "form")]
    assert not [name for _, attrs in seen.tags for name in attrs if name.startswith("on")]
    assert "window.hacked" not in hostile_page and "\x00" not in hostile_page
    data = next(text for text in seen.scripts if text.count("\n") >= 3 and "{" not in text)
    index, page = (json.loads(zlib.decompress(base64.b64decode(line))) for line in data.split())
    assert index["queries"][0]["id"] == f"{HOSTILE[0]}&\"'"
    assert [page["texts"][f"0-{i}"] for i in range(len(HOSTILE))] == list(HOSTILE)


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone(hostile_page):
    seen = Tags(hostile_page)
    policy = next(attrs["content"] for _, attrs in seen.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digest = base64.b64encode(hashlib.sha256(seen.scripts[-1].encode()).digest()).decode()
    assert rules["default-src"] == "'none'" and rules["script-src"] == f"'sha256-{digest}'"
    links = [value for _, attrs in seen.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert "@import" not in hostile_page and not re.search(r"url\((?!#)", hostile_page)


def test_pack_makes_ascii_of_whatever_data_holds():
    value = {"\ud800 lone": ["\x00", "</script>", None, 1.5, "🫖"]}
    packed = pack(value)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
    assert json.loads(zlib.decompress(base64.b64decode(packed))) == value


@pytest.mark.slow
def test_files_beside_the_page_hold_what_the_charts_show(run, tmp_path):
    page = write_report([run.path.parent.parent, run.path], tmp_path / "out")
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"index.html", "charts/advantages.png", "charts/run-1/reward.png"} <= files
    assert not [name for name in files if name.endswith(".tmp")]
    assert page.read_text().count('<section class="run" data-run="') == 2
    store = BufferStore(run.path)
    for name, table in (
        ("reward", tables.step_tables(store).rewards),
        ("composition", tables.composition_table(store)),
    ):
        with open(tmp_path / "out" / "charts" / "run-0" / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows == [{key: "" if v is None else str(v) for key, v in row.items()} for row in table]
    store.close()


def html_of(section, **changes):
    advantages = {"axis_end": 1, "constant": True, "left_out": False}
    return page.render([replace(section, **changes)], [], advantages, 0, "now")


def test_values_stand_under_their_own_headings_whatever_else_a_row_has(store, shown):
    section = report.section_of(shown(), None, None, 4000, None, browser_mb=0)
    rows = [dict(reversed([*row.items(), ("new", 1)])) for row in tables.kind_table(store)]
    heads = {"calls": "calls", "failures": "failed", "attempts": "requests", "tokens": "tokens"}
    heads |= {"tokens_per_call": "tokens / call", "seconds_per_attempt": "seconds / request"}
    lines = html_of(section, kinds=rows).rpartition("<thead>")[2].partition("</table>")[0].split("</tr>")[:-1]
    cells = [re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", line) for line in lines]
    values = [[row["kind"], *(format_number(row[key]) for key in heads)] for row in rows]
    assert cells == [["judgment", *heads.values()], *values] and len(rows) > 1


@pytest.fixture
def limits(monkeypatch):
    """Three points of a curve, and three visits of a query."""
    places = {"POINTS": (chart, page, report), "VISITS": (browser, page)}
    for module, name in ((module, name) for name, modules in places.items() for module in modules):
        monkeypatch.setattr(module, name, 3)


@pytest.mark.slow
def test_a_page_beyond_its_limits_has_a_sample_and_says_so(store, shown, limits):
    section = report.section_of(shown(), None, None, 4000, None, browser_mb=0)
    (entry,), (packed,) = section.index["queries"], section.pages
    kept, visits = json.loads(zlib.decompress(base64.b64decode(packed))), visits_of(store, entry["id"])
    assert entry["id"] == section.index["examples"][0]["query"] and entry["visits"] == 4
    assert kept["visits"] == [visits[0], *visits[2:]] and [each["number"] for each in kept["visits"]] == [1, 3, 4]
    wanted = {anchor["id"] for visit in kept["visits"] for anchor in visit["before"] + visit["after"]}
    steps = {each["step"] for each in kept["visits"]}
    stored = history.responses(store, entry["id"])
    assert kept["texts"] == {r.id: r.text for r in stored if r.initial or r.id in wanted or r.step in steps}
    said = html_of(section)
    assert "the first visit and the last 2 visits of 1 of 4 queries, which are drawn at random" in said
    assert "All 8 rows are in reward.csv in the folder charts" in said
    assert section.kinds == tables.kind_table(store), "sums are exact"


def test_charts_beyond_their_limit_draw_means_of_all_rows_and_keep_their_sums(store, request):
    whole = {each.name: each for each in run_charts(Run("run", store.path, store))}
    request.getfixturevalue("limits")
    for each in run_charts(Run("run", store.path, store)):
        assert (each.caption, each.csv()) == (whole[each.name].caption, whole[each.name].csv())
        for axes in each.figure.axes if each.name != "composition" else ():  # it has six epochs at most
            drawn = [len(line.get_xdata()) for line in axes.lines] + [len(bars) for bars in axes.containers]
            areas = [path for area in axes.collections for path in area.get_paths()[:1]]
            assert max(drawn, default=0) <= 3 and all(len(path) < 30 for path in areas)
    rewards = tables.step_tables(store).rewards
    means = [pytest.approx(fmean(row["spread"] for row in rewards[i : i + 3])) for i in (0, 3, 6)]
    assert column(rewards, "spread") == means and column([{"x": None}] * 3 + [{"x": 5}] * 3, "x")[1:] == [5] * 2


def test_chart_csv_and_svg_take_names_as_they_are(store):
    table = [{"run": 'a,"b"\n$c$', "score": 1.25}, {"run": "", "score": None}]
    rows = list(csv.DictReader(io.StringIO(Chart("x", "X", "", panels()[0], table).csv(), newline="")))
    assert rows == [{"run": 'a,"b"\n$c$', "score": "1.25"}, {"run": "", "score": ""}]
    name = "$\\frac{$ <b>&\udcff\x07"  # a folder may have a name that is not UTF-8
    row = {"method": name, "tokens": 10, "calls": 2, "average": 1.0}
    chart = score_chart([row], [])
    assert "&lt;b&gt;&amp;" in chart.svg() and "<b>" not in chart.svg()
    assert advantage_chart({name: [[0.0, 1.0]]}, 3).png().startswith(b"\x89PNG")
    assert plain("a$b") == r"a\$b" and clean("<b>\ud800\x00\u202e") == "<b>?  "
    assert "_old" in score_chart([row | {"method": "_old"}], [row]).svg()
    assert [thousands(value) for value in (0, 0.5, 1500, 2e6, 3e9)] == ["0", "0.5", "1.5k", "2M", "3G"]


def test_reach_chart_names_each_anchor_by_its_place_in_the_data_set():
    known = {"epoch": 0, "queries": 10, "share": 0.5, "low": 0.4, "high": 0.6}
    for numbers, named in (
        ((0, 2, 6), ["the worst", "number 3 from below", "the best"]),
        ((2, 4), ["number 3 from below", "number 5 from below"]),
    ):
        axes = reach_chart([known | {"anchor": f"initial-{n}"} for n in numbers], best=6).figure.axes[0]
        assert [line.get_label() for line in axes.lines] == named


def test_chart_svg_follows_the_theme_and_has_ids_of_its_own(store):
    chart = next(chart for chart in run_charts(Run("run", store.path, store)) if chart.name == "insertions")
    first, second = chart.svg("0"), chart.svg("1")
    assert "currentColor" in first and "var(--line)" in first and "<style" not in first
    assert not set(re.findall(r' id="([^"]+)"', first)) & set(re.findall(r' id="([^"]+)"', second))
    assert first == chart.svg("0")


def test_write_report_refuses_a_data_set_of_other_queries(run, tmp_path):
    queries = QueryTable(load_queries(str(QUICKSTART / "howto.jsonl")))
    with pytest.raises(DataError, match="no query 'q0'"):
        write_report([run.path], tmp_path, queries)


def test_the_proof_is_the_first_number_of_its_run(run, store, tmp_path):
    shutil.copytree(run.path.parent.parent, tmp_path / "run")
    found = {"judge": "j", "models": {"before": "a", "after": "b"}, "duels": 9, "dataset": "d/apart.jsonl"}
    found |= {"won": {"queries": 9, "probability": 0.79, "low": 0.74, "high": 0.84}}
    (tmp_path / "run" / REPORT).mkdir(exist_ok=True)
    for id, first in ((history.run_id(store), True), ("another", False)):
        (tmp_path / "run" / REPORT / COMPARE_FILE).write_text(json.dumps(found | {"run": id}))
        with open_runs([tmp_path / "run"]) as (opened,):
            headline = next(iter(headlines_of(opened, None).items()))
        wanted = "of 9 duels on apart.jsonl won by after against before; judge: j", "79 % (74 % to 84 %)"
        assert (headline == wanted) is first, headline


@pytest.mark.parametrize(
    ("last", "opening"),
    [
        ("sorry so I " * 10, "44%of the 4-grams in the newest answers repeat, 0%"),
        ("sorry sorry", "58%of the words are the commonest one, 13%"),
    ],
)
def test_the_page_of_a_collapse_opens_with_it(tmp_path, last, opening):
    texts = ["1 2 3 4 5 6 7 8", "one two three four five six seven"], ["1 2 3 4 5 6", last]
    steps = [
        [RolloutGroup(conftest.numbers("q0"), tuple(Rollout(i, text) for i, text in enumerate(pair)), step, step)]
        for step, pair in enumerate(texts)
    ]
    score_steps(tmp_path / "run" / LIVE_STORE, steps, Pointwise(), lambda messages: '{"score": 5}')
    with open_runs([tmp_path / "run"]) as (opened,):
        section = report.section_of(opened, None, None, 4000, None, browser_mb=0)
    label, share = next(iter(section.headlines.items()))
    assert (share + label).startswith(opening)


def test_write_card_needs_no_trainer(run, store, tmp_path):
    values = {
        "method": "rankbuffer", "hub_model_id": None, "hub_strategy": "every_save", "push_to_hub": False,
        "save_strategy": "no", "judge_model": "/models/<b>judge\n# H", "judge_guard": True, "judge_decoding": "none",
        "num_generations": 8, "max_completion_length": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "format_check": "(?P<answer>a|`b)", "format_weight": 0.2, "generation_batch_size": 16, "loss_type": "dapo",
        "scale_rewards": "group", "beta": 0.0, "learning_rate": 1e-6, "lr_scheduler_type": "constant",
    }  # fmt: skip
    state = TrainerState(global_step=8, max_steps=12, epoch=4.0, num_train_epochs=6)
    facts = CardFacts(values, state, RankBuffer(), 4, "/models/base", False, ["trl"])
    won = {"queries": 9, "probability": 0.79, "low": 0.74, "high": 0.84, "reason": ""}
    duel = {"run": history.run_id(store), "judge": "/models/other", "epochs": [0, 3], "duels": 200, "won": won}
    (tmp_path / "run" / REPORT).mkdir(parents=True)
    (tmp_path / "run" / REPORT / DUEL_FILE).write_text(json.dumps(duel))
    write_model_card(tmp_path / "run", store, facts)
    card = ModelCard.load(tmp_path / "run" / "README.md")
    totals, last = run.totals, buffer_size_table(store)[-1]
    for part in (
        "step 8 of 12, epoch 4 of 6", "`rankbuffer` (k0: 4, ", "4 queries", "| judge | \\<b\\>judge # H;",
        "| ``(?P<answer>a\\|`b)``, weight", "2 queries a gen",
        f"| all | {totals.calls:,} | {totals.tokens:,} |", f"| 3 | {last['anchors']:.2f} |", "{yang2027rankbuffer,",
        "Epoch 3 beats epoch 0 in 79 % (74 % to 84 %) of 200 duels", "The judge, other, saw",
    ):  # fmt: skip
        assert part in card.text, part
    assert "/models" not in card.text and card.data.tags == ["generated_from_trainer", "trl"]


@pytest.mark.slow
def test_the_command_writes_next_to_the_run_where_no_upload_looks(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run.path.parent.parent, tmp_path / "run")
    words = ["rankbuffer-report", str(tmp_path / "run"), "--judge_prompt_price", "1000"]
    monkeypatch.setattr("sys.argv", words)
    main()
    page = tmp_path / "run" / "_report" / "index.html"
    assert str(page) in capsys.readouterr().out
    prompt = sum(10 * call.attempts for _, call in run.calls if call.outcome == "parsed")
    tile = rf"<dt>cost of the judge; [\d.]+ judgments a response</dt><dd>{prompt / 1000:,.2f}</dd>"
    assert re.search(tile, page.read_text())


# The head of the page


@pytest.fixture(scope="module")
def shown(run, store):
    """The run as a report opens it, with what a checkpoint adds."""
    return lambda **known: Run("run", run.path, store, **known)


def test_headlines_of_name_reach_and_cost_and_leave_out_what_is_not_known(run, shown):
    totals = run.totals
    rollouts = sum(len(group.rollouts) for group, _ in run.visits)
    calls = f"{totals.calls / rollouts:.1f} judgments a response"
    # Four queries are too few to compare two visits, or with the data set's responses.
    known = {"responses of the policy judged": f"{rollouts:,}", f"judge tokens; {calls}": format_number(totals.tokens)}
    assert headlines_of(shown(), None) == known
    assert list(headlines_of(shown(), lambda totals: 7.5).items())[-1] == (f"cost of the judge; {calls}", "7.50")
    means = [fmean(float(r.text) for g, _ in run.visits if g.epoch == e for r in g.answered) for e in (0, 3)]
    label = "mean rubric score (0 to 100) of the responses, from epoch 0 to epoch 3"
    first = next(iter(headlines_of(shown(), None, lambda query_id, text: float(text)).items()))
    assert first == (label, f"{means[0]:.0f} to {means[1]:.0f}"), "a score that moved comes first"
    for share, text in ((1e-3, " to ".join(f"{mean / 1e3:.2f}" for mean in means)), (0, "no change")):
        assert headlines_of(shown(), None, lambda query_id, text, share=share: share * float(text))[label] == text


def test_headlines_and_facts_of_a_run_without_an_answer_that_had_a_reader(tmp_path):
    made, none = BufferStore(tmp_path / "store.sqlite"), Usage()
    calls = [Call(method, "look", "q", "", "parsed", 1, none, none, 1.0) for method in ("listwise", "reader")]
    made.commit(0, [(conftest.group(conftest.numbers("q"), "- -", 0, 0), GroupScore((-1.0, -1.0)))], calls)
    run = Run("run", made.path, made)
    found, facts = headlines_of(run, None, lambda query_id, text: 1.0), facts_of(run, 1)
    assert [row["kind"] for row in tables.kind_table(made)] == ["pass"], "not the older name that the ledger has"
    made.close()
    assert found["responses of the policy judged"] == "2" and facts["method"] == "listwise"


def test_headlines_of_show_a_share_that_moved_alone(monkeypatch, shown):
    def reach(last):
        shares = [Share(epoch, "initial-0", 10, share, 0, 1) for epoch, share in enumerate((0.001, last))]
        monkeypatch.setattr(report, "above_middle", lambda found: shares)
        return headlines_of(shown(), None)

    label = "of the responses above the data set's middle one, epoch 0 to 1"
    assert reach(0.3)[label] == "< 1 % to 30 %"
    assert label not in reach(0.002) and "responses of the policy judged" in reach(0.002)


def test_judged_by_rubrics_needs_the_embedded_judge(shown):
    judges = {"RubricJudge": True, "rubric-judge": True, "Qwen/Qwen3-30B-A3B-Instruct-2507": False, None: False}
    assert {judge: judged_by_rubrics(shown(manifest={"judge": judge})) for judge in judges} == judges
    assert not judged_by_rubrics(shown())


def test_facts_of_name_what_the_checkpoint_knows_and_why_progress_is_unknown(shown):
    alone = facts_of(shown(), 4)
    assert alone["method"] == "rankbuffer" and "policy" not in alone and alone["queries visited"] == "4"
    manifest = {"policy": "a/b", "judge": "j", "method": "rankbuffer", "method_args": {"k0": 4}}
    known = facts_of(shown(manifest=manifest | {"config": {"learning_rate": 1e-6}}), 4)
    assert (known["policy"], known["judge"], known["learning rate"]) == ("a/b", "j", "1e-06")
    assert known["method"] == "rankbuffer (k0 4)"
    few, many = (facts_of(shown(), queries) for queries in (99, 100))
    (label,) = many.keys() - few.keys()
    assert label == "preferred to the visit before" and many[label].startswith("not shown: fewer than 10 queries")


def middle(score) -> int:
    order = [id for tier in score.order for id in tier]
    return order[len(order) // 2]


def test_examples_of_are_the_middle_the_largest_and_the_smallest_rise(run, store, shown):
    texts, net = {}, {}  # the middle responses of each query; how many more rollouts its last visit placed higher
    for group, score in run.visits:
        texts.setdefault(group.query.id, []).append((middle(score), group.rollouts[middle(score)].text))
    for query_id, (first, *_, last) in visits_by_query(store).items():
        more, less = weigh(first, last)
        net[query_id] = more - less
    rises = {query_id: float(found[-1][1]) - float(found[0][1]) for query_id, found in texts.items()}
    # Both signs: the order of the queries turns, so that no place of a query is right twice.
    for sign in (0, 1, -1):
        quality = (lambda query_id, text, sign=sign: sign * float(text)) if sign else None
        examples, rise = examples_of(shown(), quality), {id: sign * rises[id] if sign else net[id] for id in net}
        for example in examples:
            found = texts[example["query"]]
            assert example["shown"] == [(0, found[0][0]), (-1, found[-1][0])], "the first visit and the last one"
        ends = [rise[example["query"]] for example in examples]
        assert ends == [sorted(rise.values())[len(rise) // 2], max(rise.values()), min(rise.values())]
        assert all(("of the score" in example["caption"]) == bool(sign) for example in examples)
