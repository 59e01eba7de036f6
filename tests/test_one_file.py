"""`examples/rankbuffer_in_one_file.py` gives the rewards, buffers and weights of the package."""

import asyncio
import json
import re
import runpy
import shutil
import sys
from dataclasses import asdict, replace

import pytest
import torch
from aiohttp import web
from conftest import ROOT, scripted_judge
from helpers.one_file import ScriptedJudge, one, trainer, unreliable, weights
from helpers.quality import CASES, QUALITIES
from helpers.scripted import ScriptedTrainer, config
from helpers.servers import GOOD, in_turn, refusing, saying, served
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankbuffer_tools.rubric_server import make_app
from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.judge._judge import REPEAT
from rankbuffer_trl.judge._rubric_judge import judge as by_rubrics
from rankbuffer_trl.judge._verdicts import VerdictError, order_verdict, position_verdict
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.testing import QUERY, make, truth

PROGRAM = ROOT / "examples" / "rankbuffer_in_one_file.py"
TURNS = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, {"role": "user", "content": "{K}"}]
JUDGE = ScriptedJudge()
FAILING = (4, 0.1)  # a case of `unreliable` for training


def row(query) -> dict:
    return asdict(query) | {"query_id": query.id}


def state(buffer) -> dict | None:
    """What the package keeps in a buffer, in the form of the example."""
    return buffer and {
        "a": [anchor.text for anchor in buffer.anchors],
        "h": [anchor.h for anchor in buffer.anchors],
        "left": buffer.left_epoch,
        "right": buffer.right_epoch,
        "observed": buffer.observed_epoch,
    }


# Algorithms 1 and 2


@settings(max_examples=100)
@given(
    visits=st.lists(st.tuples(QUALITIES, st.booleans()), min_size=1, max_size=6),
    case=CASES,
    K0=st.sampled_from([2, 3, 4, 7, 9]),
    H=st.sampled_from([1, 2, 3]),
    flags=st.fixed_dictionaries(dict.fromkeys(("bootstrap", "static", "coarse_only", "order_only"), st.booleans())),
    prompt=st.sampled_from([QUERY.prompt, TURNS]),
)
def test_rank_group_gives_the_rewards_buffers_and_prompts_of_the_package(visits, case, K0, H, flags, prompt):
    """`visits` holds the qualities of a group, and whether the next one is in a new epoch."""
    query = replace(QUERY, prompt=prompt)
    chosen = one.Settings("nowhere", "scripted", K0=K0, H=H, **flags)
    flags = {"fine": not flags["coarse_only"], "anchor_content": not flags["order_only"]}
    method = RankBuffer(k0=K0, prune_after=H, bootstrap=chosen.bootstrap, static=chosen.static, **flags)
    theirs = scripted_judge(unreliable(truth, case))
    JUDGE.answer, JUDGE.seen = unreliable(truth, case), []
    buffer = A = None
    epoch = 0
    for qualities, ends_epoch in visits:
        group = replace(make(qualities, query), epoch=epoch)
        expected = asyncio.run(method.score(group, buffer, theirs))
        buffer = expected.after or buffer
        texts = [rollout.text for rollout in group.rollouts]
        rewards, A = asyncio.run(one.rank_group(JUDGE, row(query), texts, A, epoch, chosen))
        assert rewards == list(expected.rewards)
        assert (A and vars(A)) == state(buffer)
        epoch += ends_epoch
    asked, expected = (sorted(messages[0]["content"] for messages in each.seen) for each in (JUDGE, theirs.client))
    assert asked == expected


# The judge

ANSWERS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", '{"position": 2}', '{"order": [1, 0]}', '"position": 1', "{", "}", "[", "]", ", ", "x"]
        + ["0", "3", "4", "-1", "1.0", "true", "null", '"order": ', '"position": ', "NaN", "9" * 5000]
    ),
    max_size=7,
).map("".join)


@settings(max_examples=300)
@given(answer=ANSWERS)
@example('<think>{"position": 1}')
@example('<think>x</think>```json\n{"position": 1}\n```')
@example('{"position": 1} {"position": 1}')
@example('{"position": 1, "position": 1}')
@example('{"position": 1, "why": "x"}')
@example('{"verdict": {"position": 1}}')
@example('{"position": 1} {')
@example('{"position": true}')
@example('{"position": 1.0}')
@example('{"position": -1}')
@example('{"position": 4}')
@example('{"position": ' + "[" * 100_000 + "}")
@example('{"order": [0, 1]}')
@example('{"order": [0, true]}')
@example('{"order": [0, 0]}')
@example('{"order": "01"}')
@example('{"order": null}')
def test_read_takes_exactly_the_verdicts_that_the_package_takes(answer):
    for key, verdict, ask in (
        ("position", position_verdict(3), JUDGE.insert(row(QUERY), ["1", "2", "3"], "4", False)),
        ("order", order_verdict([0, 1]), JUDGE.rank(row(QUERY), ["1", "2"], [0, 1])),
    ):
        try:
            expected = verdict.parse(answer)
        except VerdictError:
            expected = None
        JUDGE.answer = lambda messages: answer
        assert asyncio.run(ask) == expected, key


def test_ask_names_the_fault_gives_up_after_three_attempts_and_retries_no_refusal(fault):
    async def insert(handler) -> int | None:
        fault.handler, fault.seen[:] = handler, []
        return await one.Judge(fault.url, "the-judge").insert(row(QUERY), ["1", "2"], "3", False)

    assert asyncio.run(insert(in_turn(saying("Hm. " * 200), saying(GOOD)))) == 1
    first, second = fault.seen
    assert (first["model"], first["temperature"], len(first["messages"])) == ("the-judge", 0, 1)
    prompt, given, repeat = second["messages"]
    assert prompt == first["messages"][0]
    assert given == {"role": "assistant", "content": ("Hm. " * 200)[:500]}
    fault_named = "it needs exactly one JSON object, with a `position` as the question asks for it"
    assert repeat == {"role": "user", "content": REPEAT.format(error=fault_named)}

    assert asyncio.run(insert(saying(None))) is None
    assert [each["messages"][1]["content"] for each in fault.seen[1:]] == ["(no answer)"] * 2

    assert asyncio.run(insert(refusing(400, "too long"))) is None
    assert len(fault.seen) == 1


# Training


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, data_file):
    """A run of the package and one of the example, with the same rollouts and the same failures of the judge."""
    folder = tmp_path_factory.mktemp("runs")
    judge = scripted_judge(unreliable(by_rubrics, FAILING))
    theirs = ScriptedTrainer(
        tiny_policy,
        config(folder / "theirs", judge_max_failures=1.0, judge_guard=False),
        load_queries(str(data_file)),
        judge=judge,
    )
    theirs.train()
    mine = trainer(folder / "mine", tiny_policy, data_file, FAILING, save_strategy="steps", save_steps=3)
    mine.train()
    yield folder, theirs, mine
    theirs.close()


def buffers_of(theirs: ScriptedTrainer) -> dict:
    store = theirs.store
    return {id: state(buffer) for id in theirs.train_queries.ids if (buffer := store.load(id))}


@pytest.mark.slow
def test_a_run_has_the_rewards_buffers_and_weights_of_the_package(runs):
    folder, theirs, mine = runs
    rewards = (folder / "theirs" / "rewards.json").read_text()
    assert "NaN" in rewards and len(rewards.splitlines()) == 8
    assert (folder / "mine" / "rewards.json").read_text() == rewards
    assert {id: vars(A) for id, A in mine.buffers.items()} == buffers_of(theirs)
    assert torch.equal(weights(mine.model), weights(theirs.model))


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])  # in the first epoch of four steps and in the second
def test_a_resumed_run_ends_like_an_uninterrupted_one(runs, tmp_path, tiny_policy, data_file, step):
    folder, _, mine = runs
    resumed = trainer(tmp_path, tiny_policy, data_file, FAILING)
    resumed.train(str(folder / "mine" / f"checkpoint-{step}"))
    lines = (folder / "mine" / "rewards.json").read_text().splitlines()
    assert (tmp_path / "rewards.json").read_text().splitlines() == lines[step:]
    assert resumed.buffers == mine.buffers
    assert torch.equal(weights(resumed.model), weights(mine.model))


def test_a_run_stops_if_too_many_rollouts_have_no_reward(tmp_path, tiny_policy, data_file):
    stopped = trainer(tmp_path, tiny_policy, data_file, (0, 1), max_failures=0.3)
    with pytest.raises(RuntimeError, match=r"the judge failed for \d\d of 24 rollouts"):
        stopped.train()
    assert stopped.buffers == {}


def test_the_answer_of_a_rollout_comes_after_its_thinking():
    answers = {"4.": "4.", "<think>2 + 2</think>\n4. ": "4.", "<think>2 + 2": "", "so 4</think>4.": "4.", None: ""}
    for content, answer in answers.items():
        completion = [{"role": "assistant", "content": content}]
        assert one.answer_of(completion) == answer, content
        assert one.format_reward([completion]) == [float(answer != "")], content


def test_a_copy_of_the_program_alone_trains_with_a_judge_behind_http(tmp_path, tiny_policy, data_file, monkeypatch):
    assert not re.search(r"^\s*(from|import) (rankbuffer_|\.)", PROGRAM.read_text(), re.MULTILINE)
    copy, paths = shutil.copy(PROGRAM, tmp_path), []
    monkeypatch.chdir(tmp_path)

    @web.middleware
    async def noting(request, handler):
        paths.append(request.path)
        return await handler(request)

    app = make_app()
    app.middlewares.append(noting)
    command = f"one --dataset_name {data_file} --output_dir {tmp_path / 'run'} --model_name_or_path {tiny_policy}"
    command += " --judge_model rubric-judge --max_steps 1 --per_device_train_batch_size 8 --num_generations 4"
    command += " --max_completion_length 8 --use_cpu true --bf16 false --report_to none --disable_tqdm true"
    with served(app) as url:
        monkeypatch.setattr(sys, "argv", [*command.split(), "--judge_url", f"{url}/v1"])
        ended = runpy.run_path(copy, run_name="__main__")
    assert set(paths) == {"/v1/chat/completions"}
    assert ended["trainer"].reward_weights.tolist() == pytest.approx([1.0, 0.2])
    saved = json.loads((tmp_path / "run" / "buffers.json").read_text())
    assert len(saved) == 2 and {len(each["a"]) for each in saved.values()} <= {4, 5, 6, 7, 8}
    assert (tmp_path / "run" / "model.safetensors").is_file()
