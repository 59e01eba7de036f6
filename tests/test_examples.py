"""Examples: what `examples/one_group.py` prints, docstrings, and RankBuffer beside another reward in a stock run."""

import asyncio
import math
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, scripted_judge
from helpers.servers import CHAT, completion, served

from rankbuffer_trl import (
    BufferStore,
    GroupRanker,
    GroupScore,
    RankBuffer,
    RankBufferConfig,
    RankBufferError,
    load_queries,
    rank_texts,
    read_store,
)
from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.files import replacing
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge, RubricJudge
from rankbuffer_trl.judge._endpoint import Endpoint
from rankbuffer_trl.judge._rubric_judge import rubric_score
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.monitoring.progress import compare_visits
from rankbuffer_trl.ranking import rank_rewards

PATH = ROOT / "examples" / "one_group.py"


@pytest.fixture(scope="module")
def printed():
    bare = [sys.executable, "-I", "-S", PATH]  # without the environment's libraries: it needs none
    return subprocess.run(bare, capture_output=True, text=True, cwd="/", timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(PATH))


def test_the_headers_of_the_examples_name_what_uv_must_install():
    for path in (ROOT / "examples").glob("*.py"):
        header = re.match(r"# /// script\n((?:#.*\n)+)# ///\n", path.read_text())[1]
        script = tomllib.loads(re.sub("^# ?", "", header, flags=re.MULTILINE))
        words = re.findall(r"^(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
        imported = {word.partition(".")[0] for word in words}
        if path == PATH:
            assert script["dependencies"] == []
        elif "rankbuffer_trl" in imported:
            source = script["tool"]["uv"]["sources"]["rankbuffer-trl"]["path"]
            assert script["dependencies"] == ["rankbuffer-trl"] and (path.parent / source / "pyproject.toml").is_file()
        else:
            assert {*script["dependencies"]} == imported - sys.stdlib_module_names


def block(printed: str, title: str) -> list[str]:
    """The lines under a title."""
    return re.search(rf"^{title}.*\n((?:  .*\n)*)", printed, re.MULTILINE)[1].splitlines()


def test_one_group_prints_the_rewards_that_follow_from_the_rubrics(printed, example):
    rubrics = [(rubric.weight, rubric.text) for rubric in example["QUERY"].rubrics]
    qualities = [rubric_score(text, rubrics) if text else -1 for text in example["ANSWERS"]]
    assert len(set(qualities)) == len(qualities) == 8
    found = re.findall(r"^  q = (\d)  R(\d)  (\S+)$", printed, re.MULTILINE)
    worst_first = sorted(range(8), key=qualities.__getitem__)
    assert found == [(str(q), str(i), f"{-1 + 2 * q / 7:+.3f}") for q, i in enumerate(worst_first)]


def test_one_group_prints_visits_that_are_those_of_the_reward_method(printed, example):
    method, judge = RankBuffer(prune_after=example["H"]), Judge(RubricJudge())
    buffer, positions = None, []
    for epoch in range(4):
        texts = example["ANSWERS"] if epoch == 0 else example["BETTER"]
        rollouts = tuple(Rollout(i, text) for i, text in enumerate(texts))
        group = RolloutGroup(example["QUERY"], rollouts, step=50 * epoch, epoch=epoch)
        visit = asyncio.run(method.score(group, buffer, judge))
        positions.append(list(visit.positions.values()))
        if epoch == 0:
            questions = len(judge.calls)
            first = visit
        buffer = visit.after

    def ladder(anchors):
        return [f"  A{k}  {anchor.id:<10} {anchor.text}" for k, anchor in enumerate(anchors)]

    assert block(printed, "BUFFER before") == ladder(first.before.anchors)
    assert block(printed, f"BUFFER after {questions} questions") == ladder(first.after.anchors)
    assert block(printed, "BUFFER after the last visit") == ladder(buffer.anchors)
    for epoch in (1, 2, 3):
        assert f"epoch {epoch}: positions {', '.join(map(str, positions[epoch]))} of 0.." in printed
    placed = re.findall(r"^  R(\d)  (below|between|above)", printed, re.MULTILINE)
    assert [int(i) for i, _ in placed] == list(first.positions)


# Examples of use in docstrings


def example_in(documented) -> tuple[str, list[tuple[str, str]]]:
    """The code of a docstring's example, and its lines `expression  # value` that print nothing."""
    code = textwrap.dedent(re.search(r"```python\n(.*?)```", documented.__doc__, re.DOTALL)[1])
    return code, re.findall(r"^(?!print\()([\w.(\[][^#=]*|\w+\(.*\))  # ([-(\d\[].*)$", code, re.MULTILINE)


def save_a_run(folder: Path) -> None:
    """Make the store of a run with one buffer, and the same store in a checkpoint."""
    group = RolloutGroup(Query("tea", [], ()), (), step=0, epoch=0)
    after = initial_buffer(["cold", "warm"], 2)
    store = BufferStore(folder / "_rankbuffer" / "live.sqlite")
    store.commit(0, [(group, GroupScore((), after=after))])
    store.save(folder / "checkpoint-100" / "rankbuffer")
    store.close()


PRINTED = {
    RankBufferError: "queries.jsonl",
    BufferStore: "['cold', 'warm']\n",
    read_store: "0 ['tea']\n",
    compare_visits: re.search(r"print\(.*  # (.*\n)", compare_visits.__doc__)[1],
}


@pytest.mark.parametrize(
    ("documented", "values"),
    [
        *((RankBuffer, 1), (GroupScore, 0), (rank_rewards, 1), (RankBufferError, 0), (replacing, 0)),
        *((Judge, 1), (Endpoint, 1), (RankBufferConfig, 1), (load_queries, 1), (BufferStore, 0), (read_store, 0)),
        *((compare_visits, 0), (GroupRanker, 1), (rank_texts, 1)),
    ],
)
def test_the_example_of_a_docstring_runs_and_gives_what_it_says(documented, values, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT if documented is load_queries else tmp_path)
    if documented in (BufferStore, read_store):
        save_a_run(tmp_path / "runs" / "mine")
    code, said = example_in(documented)
    names = {"Path": Path, "replacing": replacing}
    exec(code, names)
    assert len(said) == values
    for expression, value in said:
        assert eval(expression, names) == pytest.approx(eval(value))
    assert PRINTED.get(documented, "") in capsys.readouterr().out
    if documented is replacing:
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("summary.json", "{}")]


# RankBuffer in a stock trainer


def test_an_unscored_rollout_has_no_reward_at_all_in_a_stock_trainer(tmp_path, tiny_policy, monkeypatch):
    def lost_sometimes(messages):
        prompt = messages[0]["content"]
        candidate = prompt.partition("\n\nCANDIDATE\n")[2].partition("\n\nReturn JSON only")[0]
        return "I cannot say." if len(candidate) % 5 == 1 else truth_by_rubrics(messages)

    def truth_by_rubrics(messages):
        return RubricJudge().answer(messages)[0]

    monkeypatch.setattr(JudgeConfig, "judge", lambda self: scripted_judge(lost_sometimes, max_attempts=1, guard=False))
    words = ["example", "--output_dir", str(tmp_path), "--model_name_or_path", tiny_policy, "--max_steps", "1"]
    words += ["--use_cpu", "--bf16", "false", "--max_completion_length", "16", "--report_to", "none", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--per_device_train_batch_size", "48"])
    trainer = runpy.run_path(str(ROOT / "examples" / "stock_trainer.py"))["trainer"]
    assert trainer.state.global_step == 1 and trainer.reward_weights.tolist() == pytest.approx([1.0, 0.2])
    ranks, lengths = (trainer._logs["rewards"][name] for name in ("rank_reward", "length_reward"))
    unscored = [math.isnan(reward) for reward in ranks]
    assert 0 < sum(unscored) < len(unscored) == 48
    assert unscored == [math.isnan(reward) for reward in lengths]
    advantages = trainer._logs["advantages"]
    assert all(advantages[i] == 0 for i, left_out in enumerate(unscored) if left_out)
    assert any(advantages[i] != 0 for i, left_out in enumerate(unscored) if not left_out)
    assert all(-1 <= reward < 0 for reward in lengths if not math.isnan(reward))


FAULTY = """
from datasets import Dataset
from rankbuffer_trl import Judge, RankBufferError, RankBufferReward
from rankbuffer_trl.judge._openai_client import OpenAIClient
from rankbuffer_trl.rewards.beyond._listwise import Listwise

prompts = Dataset.from_list([{"prompt": "Why?"}])
judge = Judge(OpenAIClient(__URL__, "m", max_retries=0), max_attempts=1)
rank = RankBufferReward(prompts, judge, __STORE__, 2, Listwise(passes=1, rerank_disputed=False))
try:
    rank(["Why?"] * 2, ["a", "b"])
except RankBufferError as error:
    print(error)
"""


@pytest.mark.slow  # a process of its own imports torch
def test_a_program_that_ends_in_an_error_of_the_judge_leaves_no_connection_open(tmp_path):
    async def prose(request):
        return completion("I cannot say.", {"prompt_tokens": 1, "completion_tokens": 1})

    with served({CHAT: prose}) as address:
        program = FAULTY.replace("__URL__", repr(address + "/v1"))
        program = program.replace("__STORE__", repr(str(tmp_path / "s.sqlite")))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and "failed 1 of 1 judgments" in done.stdout
    assert "Unclosed" not in done.stderr, done.stderr
