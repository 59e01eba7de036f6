"""The report page in a headless Chromium: what it shows, keys, search, hostile text, a thousand queries.

Left out of `make test`; `make test-browser` runs it.
"""

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runs import HOSTILE, Recorded, placed, record, record_hostile
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from rankbuffer_tools.report.report import write_report
from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.data._queries import QueryTable, load_queries
from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.rewards._pointwise import Pointwise
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import LIVE_STORE

SWITCHES = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,1000")


class Browser:
    """A browser on one page."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, page: Path) -> None:
        """Load a page and wait until its script is through."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(page.as_uri())
        self.wait(lambda: self("return document.documentElement.dataset.ready"))

    def __call__(self, script: str, *arguments):
        """Run a script."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable, seconds: float = 20.0):
        """What `condition` returns once that is true."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
            time.sleep(0.02)
        return value

    def press(self, *keys: str) -> None:
        """Type where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def text(self, id: str) -> str:
        """What an element holds, visible or not."""
        return self("return document.getElementById(arguments[0]).textContent", id)

    def texts(self, selector: str) -> list[str]:
        """What all elements of a selector hold."""
        return self("return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector)

    def listed(self) -> list[str]:
        """Ids of the queries in the list."""
        return self.texts("#queries b")

    def rungs(self) -> list[str]:
        """The ladder's entries from top to bottom: the name and all words of each."""
        return self.texts("#ladder > li")

    def click(self, id: str) -> None:
        self.driver.find_element(By.ID, id).click()

    def complaints(self) -> list[dict]:
        """What the console and the content policy said since the page was opened."""
        return self.driver.get_log("browser")


@pytest.fixture(scope="module")
def driver():
    paths = [shutil.which(name) for name in ("chromedriver", "chromium", "google-chrome")]
    if not paths[0] or not any(paths[1:]):
        pytest.fail("Chromium and chromedriver must be on the PATH: `make test-browser` as root installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[1] or paths[2]
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options, Service(paths[0]))
    session.set_page_load_timeout(60)
    yield session
    session.quit()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Recorded]:
    """A page of two runs with their data set: RankBuffer, and a method without a buffer."""
    folder = tmp_path_factory.mktemp("runs")
    found = record(folder / "ranked" / LIVE_STORE)
    record(folder / "scored" / LIVE_STORE, epochs=2, method=Pointwise())
    rubrics = [{"text": "Is high.", "weight": 1}]
    rows = ({"query_id": f"q{i}", "prompt": f"Question {i}?", "rubrics": rubrics} for i in range(4))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = QueryTable(load_queries(str(folder / "data.jsonl")))
    return write_report([folder / "ranked", folder / "scored"], folder / "out", queries), found


@pytest.fixture
def browser(driver, made) -> Browser:
    browser = Browser(driver)
    browser.open(made[0])
    return browser


def test_the_ladder_of_every_visit_is_what_was_scored(browser, made):
    expected = [(group, score) for group, score in made[1].visits if group.query.id == "q1"]
    browser.click("query-1")
    browser.wait(lambda: browser.text("query-id") == "q1")
    assert browser.text("query-text") == "Question 1?Is high. (weight 1)"
    for number, (group, score) in enumerate(expected):
        browser("showVisit(arguments[0])", number)
        assert browser.text("when") == f"visit {number + 1} of 4: step {group.step}, epoch {group.epoch}"
        rungs = browser.rungs()
        names = [re.match(r"(A|R)(\d+)(?!.*no answer)", rung) for rung in rungs]
        order = [(name[0][0], int(name[0][1:])) for name in names if name]
        place = {id: rank for rank, tier in enumerate(score.order) for id in tier}
        anchors = [("A", k) for k in reversed(range(len(score.before)))]
        assert [entry for entry in order if entry[0] == "A"] == anchors
        for (kind, id), rung in zip(order, (r for r, name in zip(rungs, names, strict=True) if name), strict=True):
            if kind == "A":
                anchor = score.before.anchors[id]
                assert anchor.text in rung and f"from epoch {anchor.epoch}" in rung
                assert ("pruned" in rung) == (anchor.id not in {a.id for a in score.after.anchors})
            elif id in score.positions:
                above = [k for what, k in order[order.index((kind, id)) :] if what == "A"]
                assert len(above) == score.positions[id]  # the anchors under it
                assert f"reward {score.rewards[id]:+.2f}".replace("-", "−") in rung  # noqa: RUF001
                assert ("becomes an anchor" in rung) == (f"{group.step}-{id}" in {a.id for a in score.after.anchors})
            else:
                assert score.rewards[id] is None and "no reward" in rung
        ranked = [id for kind, id in order if kind == "R" and id in place]
        assert ranked == sorted(place, key=place.get, reverse=True)
        for empty in group.empty:
            assert f"R{empty.id}" in rungs[-1] and "no answer" in rungs[-1]
    browser("showVisit(4)")
    assert browser.text("changes") == f"{len(expected[-1][1].after)} anchors"
    assert len(browser.rungs()) == len(expected[-1][1].after)


def test_the_browser_opens_at_the_widest_visit_and_plays_a_history(browser, made):
    spreads = {}
    for group, score in made[1].visits:
        spreads.setdefault(group.query.id, []).append(len(set(score.positions.values())))
    ids = sorted(spreads)
    widest = max(ids, key=lambda id: (max(spreads[id]), -ids.index(id)))
    number = max(range(4), key=lambda visit: (spreads[widest][visit], visit))
    assert browser.text("query-id") == widest
    assert browser.text("when").startswith(f"visit {number + 1} of 4")

    browser("PLAY = 1; showVisit(4)")
    assert browser.text("when") == "after visit 4, the newest buffer"
    browser.click("play")
    browser.wait(lambda: browser.text("play") == "Play" and browser.text("when").startswith("after visit 4"))
    browser("showVisit(0); play(); play()")
    assert browser.text("play") == "Play" and browser.text("when").startswith("visit 1 of 4"), "stopped at once"


def test_the_page_of_one_run_opens_with_the_run(driver, made):
    browser = Browser(driver)
    browser.open(write_report([made[1].path.parent.parent], made[0].parent / "one"))
    assert browser.texts("main h2") == ["ranked", "What the policy gets", "Buffer browser"]
    assert browser("return document.querySelectorAll('.run .tiles div').length") == 2
    first = browser.texts(".run h3")
    assert first.index("The run") < first.index("All charts")
    assert any(title.startswith("Before and after: q") for title in first)
    texts = {rollout.text for group, _ in made[1].visits for rollout in group.answered}
    shown = browser.texts(".run .example .text")
    assert len(shown) == 9 and {*shown[::3]} == {""} and {*shown[1::3], *shown[2::3]} <= texts
    link = browser.driver.find_element(By.CSS_SELECTOR, ".to-browser a")
    assert link.is_displayed() and link.get_attribute("href").endswith("#browser")


def test_keys_lead_through_queries_and_visits(browser):
    browser.click("query-0")
    browser.wait(lambda: browser.text("query-id") == "q0")
    browser.press("/")
    assert browser("return document.activeElement.id") == "search"
    browser.press(Keys.ARROW_DOWN)
    assert browser("return document.activeElement.id") == "queries"
    browser.wait(lambda: browser.text("query-id") == "q1")
    browser.press(Keys.ARROW_DOWN)
    browser.wait(lambda: browser.text("query-id") == "q2")
    browser.press(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_UP)
    browser.wait(lambda: browser.text("query-id") == "q0")
    chosen = "return [...document.querySelectorAll('#queries [aria-selected=true]')].map(node => node.id)"
    assert browser(chosen) == ["query-0"]
    assert browser("return document.getElementById('queries').getAttribute('aria-activedescendant')") == "query-0"
    seen = []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.END, Keys.ARROW_LEFT):
        browser.press(key)
        seen.append(int(browser("return document.getElementById('visit').value")))
    assert seen == [0, 1, 0, 0, 4, 3]
    expanded = "return [...document.querySelectorAll('.response')].map(node => node.getAttribute('aria-expanded'))"
    browser.press("e")
    assert set(browser(expanded)) == {"true"}
    browser.press("e", Keys.TAB)
    assert set(browser(expanded)) == {"false"}
    reached = set()
    for _ in range(12):
        reached.add(browser("return document.activeElement.id || document.activeElement.className"))
        browser.press(Keys.TAB)
    assert {"earlier", "visit", "response"} <= reached


def test_search_finds_ids_prompts_and_responses(browser, made):
    box = browser.driver.find_element(By.ID, "search")
    box.send_keys("Q2")
    browser.wait(lambda: browser.listed() == ["q2"])
    box.clear()
    box.send_keys("question 3")
    browser.wait(lambda: browser.listed() == ["q3"])
    texts = {
        group.query.id: {r.text for g, _ in made[1].visits if g.query == group.query for r in g.answered}
        for group, _ in made[1].visits
    }
    number = next(n for n in map(str, range(14, 70)) if 0 < sum(n in found for found in texts.values()) < 4)
    box.clear()
    box.send_keys(number)
    holders = sorted(id for id, found in texts.items() if any(number in text for text in found))
    browser.wait(lambda: sorted(browser.listed()) == holders)
    box.send_keys("nowhere at all")
    browser.wait(lambda: browser.listed() == [])
    assert browser.text("found") == "0 of 4 queries"


def test_another_run_ends_a_search(browser):
    browser("find('nowhere'); openRun(1)")  # in one go: the search has just begun
    browser.wait(lambda: browser.listed() and "queries" in browser.text("found"))
    assert browser.text("found") == "4 of 4 queries" and not browser.text("trouble")
    assert not [line for line in browser.complaints() if line["level"] == "SEVERE"]
    browser("openRun(0)")
    browser.wait(lambda: "of 4:" in browser.text("when"))


def test_the_theme_and_the_run_can_be_changed(browser):
    colour = "return getComputedStyle(document.body).backgroundColor"
    browser("setTheme('light')")
    light = browser(colour)
    browser.click("theme")
    assert browser(colour) != light
    assert browser("return getComputedStyle(document.querySelector('figure svg')).color") == "rgb(228, 232, 236)"
    charts = "return document.querySelectorAll('section.run:not([hidden]) figure').length"
    ranked = browser(charts)
    browser.driver.find_element(By.ID, "run").send_keys("scored")
    browser.wait(lambda: browser.text("when").startswith("visit 2 of 2"))
    assert 0 < browser(charts) < ranked
    assert "rubric score" not in browser.text("ladder"), "its judge is not the embedded one"
    browser("showVisit(2)")
    assert browser.text("changes") == "This method keeps no buffer."


def test_advantages_can_be_seen_at_any_step(browser, made):
    assert browser.text("advantage-number") == "step 3"  # the last one that both runs have
    assert [row.split(":")[0] for row in browser.texts(".run-bins")] == ["ranked", "scored"]
    browser.driver.find_element(By.ID, "advantage-step").send_keys(Keys.END)
    assert browser.text("advantage-number") == "step 7"
    first, second = browser.texts(".run-bins")
    scores = [score for group, score in made[1].visits if group.step == 7]
    known = sum(reward is not None for score in scores for reward in score.rewards)
    assert f"{known} responses" in first and second.endswith("no such step")


def test_the_page_fits_its_window_and_complains_of_nothing(driver, made):
    browser = Browser(driver)
    for width in (420, 800, 1400):
        driver.set_window_size(width, 1000)
        browser.open(made[0])
        assert browser("return document.documentElement.scrollWidth <= window.innerWidth"), width
        assert browser.complaints() == [], width


CUT = """return [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const box = svg.getBoundingClientRect(), found = [];
  if (!box.width) return [];
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent.trim(), text.getBoundingClientRect()]);
  texts.forEach(([label, own], i) => {
    if (own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1)
      found.push(`cut: ${label}`);
    for (const [other, its] of texts.slice(i + 1))
      if (label !== other && Math.min(own.right, its.right) - Math.max(own.left, its.left) > 2
          && Math.min(own.bottom, its.bottom) - Math.max(own.top, its.top) > 2) found.push(`${label} over ${other}`);
  });
  return found;
})"""  # labels that their picture cuts, or that lie over one another


def test_no_label_lies_outside_its_picture_or_over_another(driver, tmp_path):
    names = ["two-lists-of-eight-seed-1", "rankbuffer-with-a-small-judge"]
    for name in names:
        record(tmp_path / name / LIVE_STORE)
    page, browser = write_report([tmp_path / name for name in names], tmp_path / "out"), Browser(driver)
    for width in (420, 1400):
        driver.set_window_size(width, 1000)
        browser.open(page)
        assert browser("return document.querySelectorAll('figure svg text').length") > 50
        assert browser(CUT) == [], width
        assert browser("return document.documentElement.scrollWidth <= window.innerWidth"), width
    shown = browser.texts(".runs tbody tr")
    assert all(row.startswith(name) for row, name in zip(shown, names, strict=True))


FAINT = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const over = (colours) => {  // what the eye sees of colours, the lowest first
  canvas.fillStyle = '#fff'; canvas.fillRect(0, 0, 1, 1);
  for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
};
const light = colour => colour.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = new Set();
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, style = getComputedStyle(element);
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility({visibilityProperty: true})) continue;
  if (element.closest('[disabled], script, style, .skip')) continue;
  const below = [];
  for (let at = element; at; at = at.parentElement) below.unshift(getComputedStyle(at).backgroundColor);
  const svg = element.closest('svg');
  const ink = svg ? style.fill : style.color;
  const [one, two] = [over(below), over([...below, ink])].map(light).sort((a, b) => b - a);
  const ratio = (one + 0.05) / (two + 0.05), size = parseFloat(style.fontSize);
  if (ratio < (size >= 24 || (size >= 18.5 && style.fontWeight >= 700) ? 3 : 4.5))
    found.add(`${ratio.toFixed(2)} ${element.tagName} ${ink}: ${walker.currentNode.textContent.trim().slice(0, 30)}`);
}
return [...found];
"""  # texts whose contrast with what is below them is less than WCAG's AA


def test_all_text_can_be_read_in_both_themes(driver, made):
    driver.set_window_size(1400, 1000)
    browser = Browser(driver)
    browser.open(made[0])
    for theme in ("light", "dark"):
        browser("setTheme(arguments[0])", theme)
        assert browser(FAINT) == [], theme
    browser("document.documentElement.style.setProperty('--ink', '#555')")
    assert browser(FAINT), "the test can fail"


def test_the_page_asks_the_network_for_nothing(browser):
    events = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith(("file:", "data:", "blob:", "about:")) for url in urls)
    refused = "return fetch('http://127.0.0.1:9/').then(() => 'sent', error => String(error))"
    assert "Failed to fetch" in browser(refused)
    assert any("Content Security Policy" in entry["message"] for entry in browser.complaints())


def test_hostile_text_is_text(driver, tmp_path):
    run = tmp_path / HOSTILE[1]
    record_hostile(run / LIVE_STORE)
    browser = Browser(driver)
    browser.open(write_report([run], tmp_path / "out"))
    assert browser("return window.hacked === undefined && !document.querySelector('img, #ladder svg')")
    assert browser("return document.querySelector('main h2').textContent") == HOSTILE[1]
    assert browser.text("query-id") == f"{HOSTILE[0]}&\"'"
    browser("showVisit(0)")
    expected = sorted(text.replace("\x00", "␀").replace("\x1b", "␛") for text in HOSTILE)
    assert sorted(browser.texts(".rollout .text")) == expected
    # Text that runs the other way turns nothing outside itself.
    style = "[...document.querySelectorAll('.rollout .text')].map(node => getComputedStyle(node).unicodeBidi)"
    assert set(browser(f"return {style}")) == {"plaintext"}
    assert browser("return getComputedStyle(document.querySelector('.rollout .line')).direction") == "ltr"
    assert browser.complaints() == []


def test_a_thousand_queries_load_at_once_and_are_searched(driver, tmp_path, capsys):
    """As many visits as in the paper, 1,000 queries in 4 epochs with 8 rollouts; texts of about 100 words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]

    def text() -> str:
        return " ".join(draw.choices(words, k=100))

    store = BufferStore(tmp_path / "run" / LIVE_STORE)
    queries = [Query(f"query-{i}", [], (Rubric("Is good.", 1),), tuple(text() for _ in range(4))) for i in range(1000)]
    for step in range(20):
        scored = []
        for query in queries[200 * (step % 5) :][:200]:
            buffer = store.load(query.id) or initial_buffer(query.responses, 4)
            texts, positions = [text() for _ in range(8)], [min(i, len(buffer)) for i in range(8)]
            scored.append(placed(query, buffer, texts, positions, step, step // 5))
        store.commit(step, scored)
    store.close()
    page = write_report([tmp_path / "run"], tmp_path / "out", browser_mb=100)
    browser = Browser(driver)
    started = time.monotonic()
    browser.open(page)
    loaded = time.monotonic() - started
    assert len(browser.listed()) == 400 and browser.text("found").startswith("1000 of 1000")
    started = time.monotonic()
    box = browser.driver.find_element(By.ID, "search")
    box.send_keys(" ".join(queries[777].responses[2].split()[3:6]))
    browser.wait(lambda: browser.listed() == ["query-777"])
    searched = time.monotonic() - started
    size = page.stat().st_size / 1e6
    with capsys.disabled():
        print(f"\n1,000 queries x 4 epochs: {size:.1f} MB, shown after {loaded:.2f} s, searched in {searched:.2f} s")
    assert size < 40 and loaded < 10
