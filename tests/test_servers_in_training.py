"""A training run whose judge server, a real process, is killed with questions in flight and started again."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from conftest import ROOT, order, servers
from helpers.ports import free_ports
from helpers.scripted import ScriptedTrainer, config, contents
from transformers import TrainerCallback

from rankbuffer_trl.judge import Judge, Tally, insertion_question
from rankbuffer_trl.judge._servers import Servers
from rankbuffer_trl.store._places import LIVE_STORE

PATIENCE = 30.0  # seconds for what should happen at once
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
QUERIES, STEPS_PER_EPOCH = 6, 2  # 3 queries a step
DIES, RETURNS = STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH


class Process:
    """The rubric judge's server as a process of its own."""

    def __init__(self, port: int):
        self.port, self.url = port, f"http://127.0.0.1:{port}/v1"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Returns when it listens."""
        command = [sys.executable, "-m", "rankbuffer_tools.rubric_server", "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert any("Running on" in line for line in self.process.stdout), "it ended before it listened"
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=PATIENCE) as response:
            assert response.status == 200

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@contextmanager
def processes(ids: list[str]) -> Iterator[list[Process]]:
    """Two of them, each the home of at least two of the queries."""
    homes = [0]
    while min(homes) < 2:
        pair = [Process(port) for port in free_ports(2)]
        among = servers(*(process.url for process in pair))
        homes = [sum(order(among, id)[0] == process.url for id in ids) for process in pair]
    try:
        for process in pair:
            process.start()
        yield pair
    finally:
        for process in pair:
            process.kill()


class Outage(TrainerCallback):
    """Freezes a server before one epoch, kills it with questions in flight, starts it again before the next epoch.

    A single server is started again as soon as it is dead.
    """

    IN_FLIGHT = 5

    def __init__(self, process: Process, judge: Judge):
        self.process, self.servers, self.trainer = process, judge.client, None
        self.asked, self.frozen, self.killed = 0, False, False
        self.complete, judge.client.complete = judge.client.complete, self.watch

    async def watch(self, messages, *, question, **kwargs):
        if self.frozen and self.servers.order(question.query_id)[0].url == self.process.url:
            self.asked += 1
            if self.asked == self.IN_FLIGHT:
                asyncio.get_running_loop().call_soon(self.kill)
        return await self.complete(messages, question=question, **kwargs)

    def kill(self) -> None:
        self.process.kill()
        self.frozen, self.killed = False, True
        if len(self.servers.clients) == 1:
            self.restarted = asyncio.get_running_loop().run_in_executor(None, self.process.start)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == DIES:
            self.process.freeze()
            self.frozen = True
        if state.global_step == RETURNS:
            assert self.killed
        if state.global_step == RETURNS and len(self.servers.clients) > 1:
            self.process.start()
            self.trainer.rank_reward.scorer.run(self.until_back())

    async def until_back(self) -> None:
        """Ask until the server answers; none of it goes into the ledger."""
        table, tally = self.trainer.rank_reward.queries, Tally()
        home = next(table[id] for id in table.ids if self.servers.order(id)[0].url == self.process.url)
        question = insertion_question(home, ["no", "yes"], "perhaps")
        messages = [{"role": "user", "content": question.prompt()}]
        async with asyncio.timeout(PATIENCE):
            while tally.server != urlsplit(self.process.url).netloc:
                await self.complete(messages, question=question, seed=0, tally=tally)


def train(output_dir, policy, rows, pair: list[Process], dies: Process | None = None) -> dict:
    """A run with known rollouts; everything in its store but the ledger, and its rewards."""
    settings = config(
        output_dir,
        num_train_epochs=3,
        judge_url=[process.url for process in pair],
        judge_model="rubric-judge",
        judge_max_retries=1,
    )
    judge = Judge(Servers(settings.judge().client.clients, probe_every=0.0, wait=PATIENCE), guard=True)
    outages = [Outage(dies, judge)] if dies else []
    trainer = ScriptedTrainer(policy, settings, rows, judge=judge, callbacks=outages)
    for outage in outages:
        outage.trainer = trainer
    try:
        trainer.train()
    finally:
        trainer.close()
    tables = contents(output_dir / LIVE_STORE)
    del tables["calls"]
    return tables | {"rewards": (output_dir / "rewards.json").read_text()}


def ledger(output_dir, columns: str) -> list[tuple]:
    with sqlite3.connect(output_dir / LIVE_STORE) as db:
        return sorted(db.execute(f"SELECT {columns} FROM calls"))


EVERYTHING_ELSE = (
    "step, phase, method, kind, query_id, outcome, error, prompt_tokens, cached_tokens, completion_tokens,"
    " spent_prompt_tokens, spent_cached_tokens, spent_completion_tokens"
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 1], ids=["two servers", "one server"])
def test_a_run_whose_server_is_killed_and_restarted_loses_nothing(tmp_path, tiny_policy, rows, number):
    rows = rows.select(range(QUERIES))
    with processes(rows["query_id"]) as started:
        pair = started[:number]
        untroubled = train(tmp_path / "untroubled", tiny_policy, rows, pair)
        assert train(tmp_path / "killed", tiny_policy, rows, pair, dies=pair[0]) == untroubled
    assert ledger(tmp_path / "killed", EVERYTHING_ELSE) == ledger(tmp_path / "untroubled", EVERYTHING_ELSE)
    assert {outcome for (outcome,) in ledger(tmp_path / "killed", "outcome")} == {"parsed"}
    assert {attempts for (attempts,) in ledger(tmp_path / "untroubled", "attempts")} == {1}
    asked = ledger(tmp_path / "killed", "step, query_id, server, attempts")
    assert sum(row[3] > 1 for row in asked) >= Outage.IN_FLIGHT, "what was in flight was asked again"
    if number == 1:
        return

    lost, other = (urlsplit(process.url).netloc for process in pair)
    among = servers(*(process.url for process in pair))
    home = {id: urlsplit(order(among, id)[0]).netloc for id in rows["query_id"]}
    assert all(server == home[id] for id, server in ledger(tmp_path / "untroubled", "query_id, server"))
    moved = [row for row in asked if DIES <= row[0] < RETURNS and home[row[1]] == lost]
    assert {(server, attempts) for _, _, server, attempts in moved} == {(other, 1), (other, 2)}
    assert {id for _, id, *_ in moved} == {id for id in home if home[id] == lost}, "all moved, and in the end returned"
    assert all((row[2], row[3]) == (home[row[1]], 1) for row in asked if row not in moved)
