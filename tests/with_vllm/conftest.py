"""Tests against a real vLLM server. `make test-vllm` runs them; `make test` does not.

Without options the tests are skipped. `--vllm-python` starts a server with a tiny random model for the session.
`--url` and `--model` name a running server, which nobody else should use meanwhile.

The folder must not be called `vllm`: its parent is on `sys.path`, so Python would import the folder as the package.
"""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_server import Keeper, Server, build_model, start

from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.judge._openai_client import OpenAIClient

LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    group = parser.getgroup("vllm")
    group.addoption("--vllm-python", help="interpreter of an environment with vLLM, to start a server with")
    group.addoption("--url", help="base URL of a vLLM server that runs")
    group.addoption("--model", help="name of its model")


def pytest_configure(config):
    config.stash[LINES] = []
    if config.option.vllm_python:
        config.option.vllm_python = str(Path(config.option.vllm_python).absolute())  # programs run in other folders
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that fixtures end the server then too


def pytest_collection_modifyitems(items):
    """Run the tests that crash or may crash the server last, because a second start takes half a minute."""
    last = ("rollout_server", "doomed_server")
    items.sort(key=lambda item: max([last.index(name) + 1 for name in last if name in item.fixturenames], default=0))


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[LINES]:
        terminalreporter.section("measured")
        for line in config.stash[LINES]:
            terminalreporter.write_line(line)


@pytest.fixture
def note(request) -> Callable[[str], None]:
    """Return a function that adds a line to the summary at the end of the test run."""
    return request.config.stash[LINES].append


@pytest.fixture(scope="session")
def random_model(howto, tmp_path_factory) -> Path:
    """The folder of the tiny random model."""
    return build_model(tmp_path_factory.mktemp("judge"), [text for row in howto for text in row["responses"]])


@pytest.fixture(scope="session")
def keeper(request, tmp_path_factory) -> Iterator[Keeper]:
    """Keep a server of our own alive during the session."""
    python = request.config.getoption("vllm_python")
    if not python:
        pytest.skip("no server: `make test-vllm` starts one, --url names one")
    model = request.getfixturevalue("random_model")
    keeper = Keeper(lambda: start(python, model, tmp_path_factory.mktemp("server")))
    try:
        yield keeper
    finally:
        keeper.stop()


@pytest.fixture
def server(request) -> Iterator[Server]:
    """The server under test. A test that kills it by accident fails with the last lines of the server's log."""
    option = request.config.getoption
    if option("url"):
        if not option("model"):
            raise pytest.UsageError("--url needs --model, the name under which that server serves the judge")
        yield Server(option("url"), option("model"))
        return
    server = request.getfixturevalue("keeper").server()
    yield server
    if server.died and "doomed_server" not in request.fixturenames:
        pytest.fail(f"the server died in this test. {server.last_words()}", pytrace=False)


@pytest.fixture
def random_judge(server) -> Server:
    """The server with the tiny random model."""
    if server.process is None:
        pytest.skip("needs the tiny random model, which a server given by its URL does not have")
    return server


@pytest.fixture
def doomed_server(server) -> Server:
    """A server that the test may crash. Such a test runs after all others."""
    if server.process is None:
        pytest.skip("needs a server of its own to crash")
    return server


@pytest.fixture
def rollout_server(server) -> Server:
    """A server whose model is `random_model`, for rollouts. Its tests run after those that only judge."""
    if server.process is None:
        pytest.skip("needs a server whose weights are those of the policy")
    return server


@pytest.fixture
def client(server) -> Callable[..., OpenAIClient]:
    """Return a function that makes clients of the server."""
    return lambda **settings: OpenAIClient(server.url, server.model, **settings)


@pytest.fixture
def judge(client) -> Callable[..., Judge]:
    """Return a function that makes judges with clients of the server."""

    def make(max_attempts: int = 3, guard: bool = False, **settings) -> Judge:
        return Judge(client(**settings), max_attempts=max_attempts, guard=guard)

    return make


class Texts:
    """Queries and responses of random words.

    Args:
        words (`list[str]`):
            Where they come from.
        seed (`str`):
            Of the choice.
    """

    def __init__(self, words: list[str], seed: str):
        self.words = words
        self.random = random.Random(seed)

    def text(self, words: int) -> str:
        return " ".join(self.random.choices(self.words, k=words))

    def texts(self, count: int, words: int = 15) -> list[str]:
        return [self.text(words) for _ in range(count)]

    def rollouts(self, count: int, words: int = 15) -> tuple[Rollout, ...]:
        return tuple(Rollout(i, text) for i, text in enumerate(self.texts(count, words)))

    def query(self, id: str | None = None) -> Query:
        """A query whose prompts have the id early on, so that no other query's prompts share more than a few words."""
        id = id or f"{self.random.getrandbits(64):016x}"
        rubrics = (Rubric(self.text(8), 5), Rubric(self.text(8), 2))
        return Query(id, [{"role": "user", "content": f"{id} {self.text(10)}"}], rubrics, tuple(self.texts(4)))


@pytest.fixture
def texts(howto, request) -> Texts:
    """Random texts: different in each test, the same in each run."""
    return Texts(" ".join(text for row in howto for text in row["responses"]).split(), request.node.name)
