"""What all tests share: small queries, judges that answer as a test decides, a tiny policy. Offline and seeded."""

import os

# Libraries read these when they are imported, so they are set first. A program that a test starts inherits them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers warn about threads before every fork
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers with two threads each on two cores wait for each other

import asyncio
import contextlib
import gc
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.judges import by_number as by_number
from helpers.judges import unreachable as unreachable
from helpers.servers import KEY, Fault, serving
from hypothesis import settings

from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Judge, Question, _openai_client
from rankbuffer_trl.judge._servers import Servers
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.testing import ScriptedClient as ScriptedClient
from rankbuffer_trl.testing import scripted_judge as scripted_judge

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart"
sys.path.insert(0, str(ROOT / "recipes"))
sys.path.insert(0, str(QUICKSTART))

# `repeatable` tries the same few examples in every run. `search` looks for new ones: HYPOTHESIS_PROFILE=search.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Each client of a judge reads the certificates of all authorities, which takes 30 ms, and no server here has one.
ssl.create_default_context = cache(ssl.create_default_context)


@pytest.fixture(autouse=True)
def warned_of_nothing() -> None:
    """Without it, a test that counts warnings would miss one that an earlier test of the same process has had."""
    if logging := sys.modules.get("accelerate.logging"):  # which takes seconds to import, and few tests need it
        logging.MultiProcessAdapter.warning_once.cache_clear()


class Known(dict):
    """Has every address, so that no client looks at a list of models: a test counts its own requests."""

    def __contains__(self, url: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def known_servers(monkeypatch) -> None:
    monkeypatch.setattr(_openai_client, "VLLM", Known())


def run_program(path: Path, *arguments: object, timeout: float) -> str:
    """Run a Python program and return what it printed. If it fails, end every process that it has started."""
    command = [sys.executable, str(path), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None or process.returncode:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    return output


def ask_all(judge: Judge, questions: Iterable[Question]) -> list:
    """Ask questions at once, close the judge's client and return the verdicts."""

    async def run():
        try:
            return await judge.ask_all(questions)
        finally:
            await judge.client.close()

    return asyncio.run(run())


def ask(judge: Judge, question: Question) -> tuple[object, Call]:
    """Ask one question and return its verdict and its only call."""
    (verdict,) = ask_all(judge, [question])
    (call,) = judge.drain()
    return verdict, call


# Several servers of a judge, by their addresses.


def servers(*urls: str) -> Servers:
    return Servers([SimpleNamespace(url=url, name=url) for url in urls])  # all that their order depends on


def order(among: Servers, query_id: str) -> list[str]:
    return [client.url for client in among.order(query_id)]


# A judge for texts that are numbers: a higher number is a better response.


def numbers(query_id: str = "n", anchors: str = "10 20 30 40") -> Query:
    return Query(query_id, [{"role": "user", "content": "?"}], (Rubric("Is high.", 1),), tuple(anchors.split()))


def group(query: Query, texts: str, step: int, epoch: int | None = None) -> RolloutGroup:
    """Make a group from texts in one line, where `-` is a rollout without an answer."""
    rollouts = tuple(Rollout(i, "" if text == "-" else text) for i, text in enumerate(texts.split()))
    return RolloutGroup(query, rollouts, step, epoch)


@pytest.fixture
def scorer(tmp_path):
    """Make scorers, each with its own store, and close all of them at the end."""
    from rankbuffer_trl.training._scorer import GroupScorer  # imports the trainer, which most files do not need

    made = []

    def make(judge: Judge, method: RankBuffer | None = None, **kwargs) -> GroupScorer:
        store = BufferStore(tmp_path / f"store-{len(made)}.sqlite")
        made.append(GroupScorer(method or RankBuffer(), judge, store, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    store = BufferStore(tmp_path / "live.sqlite")
    yield store
    store.close()


@pytest.fixture(scope="module")
def faulty_server() -> Iterator[Fault]:
    with serving() as fault:
        yield fault


@pytest.fixture
def fault(faulty_server, monkeypatch) -> Fault:
    """A server that misbehaves as a test decides, for clients that read their key from `FAULT_KEY`."""
    monkeypatch.setenv("FAULT_KEY", KEY)
    return faulty_server


@pytest.fixture
def query() -> Query:
    return Query(
        id="tea",
        prompt=[{"role": "user", "content": "How do I make tea?"}],
        rubrics=(Rubric("Says how long to wait: three minutes.", 5), Rubric("Is written in complete sentences.", 2)),
        responses=("no", "hot water", "boil water, wait", "Boil water. Wait.", "Wait three minutes.", "a b", "c d"),
    )


@pytest.fixture(scope="session")
def howto() -> list[dict]:
    """The rows of the quickstart's data set."""
    return [json.loads(line) for line in (QUICKSTART / "howto.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def data_file(howto, tmp_path_factory) -> Path:
    """A file with the first twelve rows of the quickstart's data set."""
    path = tmp_path_factory.mktemp("data") / "twelve.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in howto[:12]))
    return path


@pytest.fixture(name="cache")
def cache_of_data_sets(tmp_path, monkeypatch):
    """A cache of data sets for one test alone. A file asks for it with `pytest.mark.usefixtures("cache")`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def rows(data_file):
    from rankbuffer_trl.data._queries import load_queries

    return load_queries(str(data_file))


@pytest.fixture(scope="session")
def tiny_policy(howto, tmp_path_factory) -> str:
    """The folder of an untrained Qwen3 with one layer and the quickstart's tokenizer."""
    import policy
    import torch

    path = str(tmp_path_factory.mktemp("policy"))
    tokenizer = policy.build_tokenizer([text for row in howto for text in row["responses"]])
    torch.manual_seed(0)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    model = policy.build_model(tokenizer, hidden_size=32, intermediate_size=64, num_hidden_layers=1, **heads)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    gc.collect()
    gc.freeze()  # each training collects garbage when it begins, else among all that the imports have made
    return path


@pytest.fixture
def training(tmp_path, tiny_policy, rows):
    """Make trainers with known rollouts in a folder of `tmp_path`, and close them. Settings go to `config`."""
    from dataclasses import fields

    from helpers.scripted import ScriptedTrainer, config

    made, settings = [], {field.name for field in fields(config(tmp_path))}

    def make(folder: str = "", cls: type = ScriptedTrainer, **given):
        args = config(tmp_path / folder, **{key: given.pop(key) for key in settings & given.keys()})
        made.append(cls(tiny_policy, args, rows, **given))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def quickstart(tmp_path, tiny_policy, data_file):
    """Run `rankbuffer-train` with the quickstart's recipe, twelve queries and more words of a command line."""
    from rankbuffer_tools.train import command
    from rankbuffer_tools.train.parser import RecipeParser

    words = ["--config", str(QUICKSTART / "quickstart.yaml"), "--model_name_or_path", tiny_policy]
    words += ["--dataset_name", str(data_file), "--output_dir", str(tmp_path)]
    return lambda *more: command.run(*RecipeParser().parse_args_and_config([*words, *map(str, more)]))


@pytest.fixture(scope="session")
def whole(howto, tiny_policy, tmp_path_factory) -> tuple[Path, tuple]:
    """The folder of a run that nobody stopped, with a checkpoint at every step, and what it ended with."""
    from datasets import Dataset
    from helpers.sampled import train

    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, train(output_dir, tiny_policy, Dataset.from_list(howto[:12]))


# A run to report on.


@pytest.fixture(name="run", scope="module")
def run_to_report(tmp_path_factory):
    """Four queries in four epochs, by the rules of the paper but for pruning after 2."""
    from helpers.runs import record

    return record(tmp_path_factory.mktemp("run") / LIVE_STORE)


# An evaluation, whose model and judge are behind one address.


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> dict:
    """The settings that name the small assets of all benchmarks."""
    from helpers.evaluation_assets import build

    folder = tmp_path_factory.mktemp("assets")
    return dict(assets_dir=str(folder), assets_manifest=str(build(folder)))


@pytest.fixture
def values(assets, tmp_path, tiny_policy):
    """Make the settings of an evaluation whose model and judge are behind `url`, as a dict."""
    from helpers.evaluation_assets import values_of

    return lambda url, **changes: values_of(url, tiny_policy, tmp_path / "out") | assets | changes


@pytest.fixture(name="settings")
def settings_of_evaluation(values):
    """Make an `EvaluationConfig` in the same way."""
    from evaluation.config import EvaluationConfig

    return lambda url, **changes: EvaluationConfig(**values(url, **changes))
