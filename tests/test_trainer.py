"""RankBufferTrainer on real TRL: rewards, evaluation, unscored rows, metrics, errors before training."""

import json
import math
import re
import shutil
import sqlite3
from contextlib import nullcontext
from types import SimpleNamespace

import pandas
import pytest
import torch
from conftest import scripted_judge
from helpers.scripted import ScriptedTrainer, config, contents
from helpers.visits import call
from peft import LoraConfig
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer

from rankbuffer_tools.batch.recipes import read_recipe
from rankbuffer_tools.paper import RECIPE_FOLDER
from rankbuffer_trl._answers import AnswerExtractor
from rankbuffer_trl.data._queries import DataError, QueryTable, load_queries
from rankbuffer_trl.errors import NotFiniteError, SettingsError
from rankbuffer_trl.judge import Judge, JudgeError, RubricJudge, TransportError
from rankbuffer_trl.judge._rubric_judge import judge as rubric_verdict
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.rewards.beyond._listwise import Listwise
from rankbuffer_trl.store._places import LIVE_STORE, read_store
from rankbuffer_trl.training._reward_function import RankBufferReward
from rankbuffer_trl.training._trainer import RankBufferTrainer, scale_by_signal


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_policy, data_file):
    """A run of three epochs and an evaluation: folder, trainer, what was read, and what a reward function got."""
    read, got, stock = [], [], AnswerExtractor.read

    def spy(completions, query_id, split, epoch, extracted_answer, **kwargs):
        got.append((set(split), set(epoch), len(set(query_id)), [answer.text for answer in extracted_answer]))
        return [0.0] * len(completions)

    folder, rows = tmp_path_factory.mktemp("trained"), load_queries(str(data_file))
    args = config(folder, num_train_epochs=3, per_device_eval_batch_size=8, log_completions=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerExtractor, "read", lambda *args: read.append(stock(*args)) or read[-1])
        trainer = ScriptedTrainer(tiny_policy, args, rows, rows.select([0]), reward_funcs=[spy])
        trainer.train()
        trainer.evaluate()
    trainer.close()
    return SimpleNamespace(folder=folder, trainer=trainer, rows=rows, read=read, got=got, args=args)


def test_trainer_ranks_every_query_once_an_epoch_and_its_buffer_grows(trained):
    table = contents(trained.folder / LIVE_STORE)
    visits = [(query_id, epoch) for query_id, _, epoch, *_ in table["groups"]]
    assert sorted(visits) == sorted((id, epoch) for id in trained.rows["query_id"] for epoch in range(3))
    sizes = [len(json.loads(anchors)) for _, _, anchors, *_ in table["buffers"]]
    assert min(sizes) >= 2 and max(sizes) > 4
    assert all(-1 <= reward <= 1 for row in table["groups"] for reward in json.loads(row[6]))


def test_trainer_reads_for_the_judge_what_the_reward_functions_get(trained):
    assert [answers for *_, answers in trained.got] == [[one.text for one in step] for step in trained.read]
    steps = [({"train"}, {step // 4}, 3) for step in range(12)] + [({"eval"}, {None}, 1)]
    assert [each[:3] for each in trained.got] == steps
    assert trained.args.reward_weights is None, "the caller's settings stay as they were"


def test_trainer_logs_metrics(trained):
    history = trained.trainer.state.log_history
    first = history[0]
    assert first["buffer/size"] > 4 and first["buffer/initial"] == 4 and first["rank/fine_ranked_groups"] > 0
    assert sum(value for name, value in first.items() if name.startswith("insert/")) == pytest.approx(1)
    assert first["judge/calls"] >= first["rollouts/distinct"] * (24 - 24 * first["rank/empty"]) > 3
    assert first["judge/prompt_tokens"] > first["judge/completion_tokens"] > 0
    assert first["judge/failures"] == 0 and first["judge/seconds"] > 0
    assert first["rewards/rank_reward/mean"] == pytest.approx(0, abs=0.3)
    names = {name for entry in history for name in entry if "/" in name}
    assert {"buffer/right", "buffer/left", "buffer/refine", "rank/ties", "judge/cached_tokens"} <= names


def test_trainer_writes_where_each_completion_was_placed(trained):
    store = read_store(trained.folder)
    groups = iter(list(store.rows("SELECT positions, tiers FROM groups ORDER BY step, rowid")))
    store.close()
    for step in range(1, 12):  # the evaluation writes over the table of the last step
        table = pandas.read_parquet(trained.folder / "completions" / f"completions_{step:05}.parquet")
        assert len(table) == 24
        shown = table[["position", "tier"]].astype(object).where(table.notna(), None)
        for first in (0, 8, 16):
            positions, tiers = map(json.loads, next(groups))
            places = {id: tier for tier, ids in enumerate(tiers) for id in ids}
            expected = [(positions.get(str(id)), places.get(id)) for id in range(8)]
            assert list(shown[first : first + 8].itertuples(index=False, name=None)) == expected


def test_reward_takes_text_that_no_file_can_hold(tmp_path, rows):
    reward = RankBufferReward(rows, Judge(RubricJudge()), tmp_path / "buffers.sqlite", num_generations=2)
    reward([rows[0]["prompt"]] * 2, ["half a \ud83e teapot", "whole"], query_id=[rows[0]["query_id"]] * 2)
    reward.close()
    with sqlite3.connect(tmp_path / "buffers.sqlite") as db:
        texts = [text for (text,) in db.execute("SELECT text FROM responses WHERE id NOT LIKE 'initial%'")]
    assert texts == ["half a ? teapot", "whole"]


def test_reward_in_an_evaluation_alone_keeps_the_buffers_of_an_earlier_run(tmp_path, rows):
    """A new process has not gone back to the step where it starts, and an evaluation must not do that either."""
    path, found = tmp_path / "buffers.sqlite", []
    train, test = rows.select(range(1, len(rows))), rows.select([0])
    for sets in {"dataset": rows}, {"dataset": train, "eval_dataset": test}:
        reward = RankBufferReward(judge=Judge(RubricJudge()), store=path, num_generations=2, **sets)
        reward([rows[0]["prompt"]] * 2, ["Boil it.", "Wait three minutes."], [rows[0]["query_id"]] * 2)
        reward.close()
        found.append(contents(path))
    tables = ("responses", "buffers", "groups")
    assert found[0]["groups"] and all(found[1][table] == found[0][table] for table in tables)
    assert {row[1] for row in found[1]["calls"]} == {"train", "eval"}


def test_reward_counts_an_evaluation_before_the_first_step_to_the_training(tmp_path, rows):
    path, state, texts = tmp_path / "buffers.sqlite", TrainerState(max_steps=9), ["Boil.", "Wait.", "Stir.", "Pour."]
    args, test = config(tmp_path, num_generations=4, num_generations_eval=3), rows.select([1])
    for _ in "an earlier run", "this run":
        reward = RankBufferReward(rows.select([0]), Judge(RubricJudge()), path, args=args, eval_dataset=test)
        sizes = {}
        for i, split, n in (1, "eval", 3), (0, "train", 4):  # a column `split` of the user's means nothing
            log = {}
            asked = [rows[i]["prompt"]] * n, texts[:n], [rows[i]["query_id"]] * n
            reward(*asked, trainer_state=state, log_metric=log.__setitem__, split=["test"] * n)
            sizes[split] = log["buffer/size"]
        reward.close()
        assert sizes == {"eval": 4, "train": 5}, "an evaluation changes no buffer"
    for each in path, path.with_stem("buffers-1"):
        assert {row[1] for row in contents(each)["calls"]} == {"eval", "train"} and len(contents(each)["groups"]) == 1


def test_reward_takes_an_evaluation_that_fills_up_with_its_first_queries(tmp_path, rows):
    train, test = rows.select([0]), rows.select([1, 2])
    reward = RankBufferReward(train, Judge(RubricJudge()), tmp_path / "a", num_generations=2, eval_dataset=test)
    for order, fits in ((1, 1, 2, 2, 1, 1), True), ((1, 1, 1, 1, 2, 2), False), ((1, 2, 1, 2), False):
        asked = [rows[i]["prompt"] for i in order], ["Boil it."] * len(order), [rows[i]["query_id"] for i in order]
        with nullcontext() if fits else pytest.raises(SettingsError, match="num_generations=2 here"):
            reward(*asked)
    reward.close()


def test_reward_belongs_to_one_run_of_one_trainer(tmp_path, rows):
    path = tmp_path / "a.sqlite"
    reward = RankBufferReward(rows, Judge(RubricJudge()), path, num_generations=2)
    asked = [rows[0]["prompt"]] * 2, ["Boil it.", "Wait three minutes."], [rows[0]["query_id"]] * 2
    for step in 4, 4, 5:
        reward(*asked, trainer_state=TrainerState(global_step=step, max_steps=9))
    before = contents(path)
    with pytest.raises(SettingsError, match=r"step 0 after step 5: .* Make another RankBufferReward"):
        reward(*asked, trainer_state=TrainerState(max_steps=9))
    reward.close()
    assert contents(path) == before and len(before["groups"]) == 2


def test_reward_refuses_other_numbers_of_generations_and_prompts_that_it_does_not_know(tmp_path, rows):
    judge, args = Judge(RubricJudge()), config(tmp_path, num_generations=8)
    for numbers in {}, {"num_generations": 4, "args": args}, {"num_generations_eval": 2, "args": args}:
        with pytest.raises(SettingsError, match="pass args, the settings of the trainer"):
            RankBufferReward(rows, judge, tmp_path / "a.sqlite", **numbers)
    for metric in "eval_loss", "eval_rewards/rank_reward/mean":
        with pytest.raises(SettingsError, match="the same for every policy"):
            best = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, metric_for_best_model=metric)
            RankBufferReward(rows, judge, tmp_path / "a.sqlite", args=best)
    with pytest.raises(DataError, match=r"12 prompts of eval_dataset are also in dataset, .*'How"):
        RankBufferReward(rows, judge, tmp_path / "a.sqlite", args=args, eval_dataset=rows)
    for here, trainer in (4, 8), (8, 4):
        reward = RankBufferReward(rows, judge, tmp_path / f"{here}.sqlite", num_generations=here)
        asked = [row for row in rows.select(range(16 // trainer)) for _ in range(trainer)]
        said = f"num_generations={here} here, but the trainer made {trainer} rollout"
        with pytest.raises(SettingsError, match=said):
            reward([row["prompt"] for row in asked], ["text"] * 16, [row["query_id"] for row in asked])
        with pytest.raises(DataError, match=r"begins with 'Why is it .*pass the trainer's .* its eval_dataset"):
            reward([[{"role": "user", "content": "Why is it so?"}]] * here, ["text"] * here)
        reward.close()
        assert not contents(tmp_path / f"{here}.sqlite")["groups"]


def test_trainer_leaves_an_unplaced_rollout_out_of_the_baseline(tmp_path, training):
    def lost_for_short_answers(messages):
        prompt = messages[0]["content"]
        candidate = prompt.partition("\n\nCANDIDATE\n")[2].partition("\n\nReturn JSON only")[0]
        return "I cannot say." if 0 < len(candidate) < 40 else rubric_verdict(prompt)

    judge = scripted_judge(lost_for_short_answers, max_attempts=2, guard=True)
    trainer = training(max_steps=1, judge_max_failures=1.0, judge=judge)
    seen = []
    stock = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: seen.append(stock(*args)) or seen[-1]
    trainer.train()
    rewards = seen[0]
    unscored = torch.isnan(rewards[:, 0])
    assert 0 < unscored.sum() < len(rewards)
    assert torch.isnan(rewards[unscored]).all(), "the format reward must be NaN too, or TRL counts the rank as 0"
    assert not torch.isnan(rewards[~unscored]).any()
    advantages = torch.tensor(trainer._logs["advantages"])
    assert (advantages[unscored] == 0).all() and (advantages[~unscored] != 0).any()
    for _, _, _, _, positions, _, group_rewards, added, _ in contents(tmp_path / LIVE_STORE)["groups"]:
        placed = {f"0-{i}" for i in json.loads(positions)}
        assert {id for id, _ in json.loads(added)} <= placed
        assert all(f"0-{i}" not in placed for i, reward in enumerate(json.loads(group_rewards)) if reward is None)


def test_trainer_asks_a_first_question_before_anything_runs(training):
    judge = scripted_judge(lambda messages: TransportError("connection refused"), guard=True)
    trainer = training(judge=judge)
    store = trainer.store
    store.commit(0, [], [call()], "train")  # of an earlier run in this folder
    with pytest.raises(JudgeError, match=r"first question.*unreachable.*connection refused"):
        trainer.train()
    assert trainer.state.global_step == 0 and store.totals().calls == 1, "nothing of the earlier run is deleted"


def test_trainer_avoids_cudnns_attention_because_its_gradients_are_nan_at_some_lengths(training):
    torch.backends.cuda.enable_cudnn_sdp(True)
    training()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_trainer_refuses_bad_data_when_it_is_built(tmp_path, tiny_policy, rows):
    (tmp_path / "file").write_text("in the way")
    too_long = r"'make-tea'\): its prompt has \d+ tokens, max_prompt_length is 8"
    for change, folder, settings, message in [
        (lambda: rows.remove_columns("responses"), "out", {}, "no column 'responses'"),
        (lambda: rows.select([0] * 12), "out", {}, "the query_id .make-tea. is that of row 1"),
        (lambda: rows.select(range(2)), "out", {}, "fewer than the 3 of one generation batch"),
        (lambda: rows, "out", {"max_prompt_length": 8}, too_long),
        (lambda: rows, "file/out", {}, "is a file or lies below one"),
    ]:
        with pytest.raises((DataError, SettingsError), match=message):
            RankBufferTrainer(tiny_policy, config(tmp_path / folder, **settings), change())
    long = rows.select([1]).map(lambda row: {"prompt": [{"role": "user", "content": "word " * 500}]})
    with pytest.raises(DataError, match="max_prompt_length is 300"):
        RankBufferTrainer(tiny_policy, config(tmp_path / "out", max_prompt_length=300), rows, long)


STOCK_KEYS = (
    "output_dir use_cpu bf16 report_to num_generations per_device_train_batch_size max_completion_length "
    "num_train_epochs learning_rate logging_steps save_strategy disable_tqdm seed"
).split()


def train_stock(tmp_path, policy, rows, method=None, **changes):
    """Train with TRL's own trainer, and return it. It takes no further settings of this project."""
    more = dict(num_generations=8, method=method)
    reward = RankBufferReward(rows, Judge(RubricJudge()), tmp_path / "buffers.sqlite", **more)
    settings = config(tmp_path)
    stock = GRPOConfig(**{key: getattr(settings, key) for key in STOCK_KEYS} | changes)
    trainer = GRPOTrainer(policy, reward_funcs=[reward], args=stock, train_dataset=rows)
    trainer.train()
    reward.close()
    return trainer


@pytest.mark.parametrize("method", [RankBuffer(), RankBuffer(bootstrap=True)], ids=["anchors", "bootstrap"])
def test_reward_is_a_plain_callable_for_a_stock_trainer(tmp_path, tiny_policy, rows, method):
    trainer = train_stock(tmp_path, tiny_policy, rows, method)
    with sqlite3.connect(tmp_path / "buffers.sqlite") as db:
        visits = db.execute("SELECT query_id, group_concat(epoch) FROM groups GROUP BY query_id").fetchall()
        sources = {s for (text,) in db.execute("SELECT anchors FROM buffers") for _, s, *_ in json.loads(text)}
    assert len(visits) == 12 and {epochs for _, epochs in visits} == {"0,1"}
    assert ("bootstrap" if method.bootstrap else "initial") in sources
    assert trainer.state.log_history[0]["judge/calls"] > 0
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_reward_takes_prompts_that_are_texts_without_ids(tmp_path, tiny_policy, rows):
    texts = rows.map(lambda row: {"prompt": row["prompt"][0]["content"]}).select_columns("prompt")
    train_stock(tmp_path, tiny_policy, texts, Listwise(2), max_steps=1)
    found = {row[0] for row in contents(tmp_path / "buffers.sqlite")["groups"]}
    assert found and found < set(QueryTable(texts).ids)
    assert all(re.fullmatch("prompt-[0-9a-f]{16}", id) for id in found)


def test_beside_takes_functions_that_trl_calls_itself():
    async def later(**columns):
        return []

    for other in (later, "a/model", torch.nn.Linear(1, 1), SimpleNamespace):
        with pytest.raises(SettingsError, match="beside takes functions"):
            RankBufferReward.beside(None, other)
    for value in (math.nan, -math.inf):
        rank = SimpleNamespace(_unscored=[False, False], _evaluating=False)
        _, length = RankBufferReward.beside(rank, lambda value=value, **columns: [None, value])
        with pytest.raises(NotFiniteError, match=r"gave .* for rollout 1"):
            length()
        rank._evaluating = True
        assert length() == [None, None], "an evaluation goes on"


def test_run_reads_its_data_once(tmp_path, quickstart, data_file, monkeypatch):
    tables = []
    stock = QueryTable.__init__
    monkeypatch.setattr(QueryTable, "__init__", lambda self, *args: tables.append(self) or stock(self, *args))
    quickstart("--max_steps", 1, "--per_device_train_batch_size", 8, "--max_completion_length", 8)
    assert len(tables) == 1
    assert f"{data_file.name}, 12 queries" in (tmp_path / "README.md").read_text()


def test_scale_by_signal_divides_by_the_share_of_groups_with_a_signal():
    for totals, share in [
        ([[1.0, -1.0], [0.5, 0.5]], 0.5),
        ([[1.0, -1.0], [0.0, 1.0]], 1.0),
        ([[1.0, 1.0], [0.5, 0.5]], 1.0),
        ([[1.0, math.nan], [0.5, -0.5], [math.nan, math.nan], [0.2, 0.2]], 0.25),
    ]:
        rewards = torch.tensor(totals).flatten()[:, None]
        scaled = scale_by_signal(rewards, torch.tensor([1.0]), G=2)
        assert torch.equal(scaled.nan_to_num(9), (rewards / share).nan_to_num(9)), totals
    rewards = torch.tensor([[0.5, 1.0], [0.5, 0.0], [0.1, 1.0], [0.1, 1.0]])  # the format reward alone is a signal
    assert torch.equal(scale_by_signal(rewards, torch.tensor([1.0, 0.2]), G=2), rewards / 0.5)
    assert torch.equal(scale_by_signal(rewards, torch.tensor([1.0, 0.0]), G=2), rewards)


def test_gdpos_recipe_weighs_the_format_reward_against_scores_that_are_not_divided(tmp_path, tiny_policy, rows):
    recipe = read_recipe(RECIPE_FOLDER / "paper" / "gdpo.yaml")
    objective = {key: recipe[key] for key in ("scale_rewards", "format_weight")}
    given = torch.rand(24, 2, generator=torch.Generator().manual_seed(1))
    given[:, 1] = (given[:, 1] < 0.8).float()
    trainer = ScriptedTrainer(tiny_policy, config(tmp_path, max_steps=1, **objective), rows)
    trainer._calculate_rewards = lambda *_: given
    trainer.train()
    trainer.close()
    total = given @ torch.tensor([7 / 8**0.5, 0.2])  # the normalised scores as they were, and the paper's weight
    expected = (total.view(3, 8) - total.view(3, 8).mean(1, keepdim=True)).flatten() / total.std()
    assert list(trainer._logs["advantages"]) == pytest.approx(expected.tolist(), abs=2e-3)


def test_trainer_warns_of_a_policy_that_does_not_stop_at_the_end_of_its_turn(rows, tiny_policy, tmp_path, caplog):
    base = tmp_path / "base"  # its template ends a turn as that of a chat model does, and its generation goes on
    shutil.copytree(tiny_policy, base)
    for name, changed in (("tokenizer", {"eos_token": "<|endoftext|>"}), ("generation", {"eos_token_id": 0})):
        path = base / f"{name}_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    own = {"generation_kwargs": {"eos_token_id": 2}}
    for run, (policy, given, warned) in enumerate([(tiny_policy, {}, False), (base, own, False), (base, {}, True)]):
        ScriptedTrainer(str(policy), config(tmp_path / str(run), **given), rows).close()
        assert ("ends an answer with '<|im_end|>', and its generation does not stop there" in caplog.text) == warned


def test_trainer_warns_of_bfloat16_weights_that_do_not_move(training, caplog):
    half, lora = {"model_init_kwargs": {"dtype": "bfloat16"}}, LoraConfig(target_modules="all-linear")
    whole = LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"])
    low = half | {"learning_rate": 1e-6}
    cases = [(low, True), (half | {"learning_rate": 1e-3}, False), ({"learning_rate": 1e-6}, False)]
    cases += [(low | {"peft_config": lora}, False), (low | {"peft_config": whole}, True)]
    for number, (settings, said) in enumerate(cases):
        caplog.clear()
        trainer = training(str(number), **settings)
        assert ("set dtype to float32" in caplog.text) == said, settings
        if settings.get("peft_config") is lora:  # as TRL does with a quantised base
            trainer.model.to(torch.bfloat16)
            assert not trainer._rounds_away()
