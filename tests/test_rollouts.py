"""Rollouts of a server with one request each: TRL's real client and trainer, a real HTTP server, real judging."""

import asyncio
import logging
import math
import os
import pickle
import resource
import runpy
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from helpers.contents import contents
from helpers.judges import Embedded
from helpers.rollout_server import RolloutServer, allow_client, server_config
from helpers.servers import served
from peft import LoraConfig
from peft.tuners.lora import Linear
from requests import ReadTimeout
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies
from transformers import AutoConfig
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rankbuffer_trl.checkpointing._distributed import MainProcessError
from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.training import _rollouts as trainer_module
from rankbuffer_trl.training._rollouts import (
    KEEPALIVE,
    RETRIES,
    RolloutError,
    SeparateRollouts,
    known_to_us,
    send_copies,
    spare_proxy,
)
from rankbuffer_trl.training._trainer import RankBufferTrainer

EVENT_LIMIT = 30.0  # seconds for what should happen at once
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(autouse=True, scope="module")
def client_without_vllm():
    with pytest.MonkeyPatch.context() as patch:
        for module in (vllm_client, vllm_generation):
            patch.setattr(module, "is_vllm_available", module.is_vllm_available)
        for name in ("init_communicator", "update_named_params"):
            patch.setattr(VLLMClient, name, getattr(VLLMClient, name))
        allow_client()
        yield


@pytest.fixture(scope="module")
def server(tiny_policy, howto):
    """Start rollout servers: gives the server and its address."""

    @contextmanager
    def start(**behaviour):
        made = RolloutServer(tiny_policy, [text for row in howto for text in row["responses"]], **behaviour)
        with served(made.app()) as url:
            yield made, url

    return start


@pytest.fixture
def run():
    """Run coroutines on a loop in another thread, as `GroupScorer.run` does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(EVENT_LIMIT)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(EVENT_LIMIT)
    loop.close()


@pytest.fixture
def separate(server, run):
    """Start a server of rollouts that are generated one by one: gives the server and the client."""

    @contextmanager
    def start(on_rollout=lambda row, ids: None, timeout=None, vocabulary=math.inf, **behaviour):
        with server(**behaviour) as (made, url):
            client = SeparateRollouts(VLLMClient(base_url=url), run, on_rollout, timeout, vocabulary)
            try:
                yield made, client
            finally:
                client.close()

    return start


# One request per rollout is TRL's one request

SAMPLING = {
    "defaults": {},
    "all": dict(n=3, repetition_penalty=1.1, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, max_tokens=9)
    | dict(logprobs=2, structured_outputs_regex="[a-z ]+", generation_kwargs={"seed": 11, "stop": ["x"], "top_k": 5}),
    "a seed of 0": {"n": 2, "max_tokens": 24, "generation_kwargs": {"seed": 0}},
    "without logprobs": {"n": 2, "logprobs": None, "generation_kwargs": {"seed": 3}},
    "without a seed": {"n": 4, "max_tokens": 24, "generation_kwargs": {"presence_penalty": 0.5}},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_generate_asks_for_what_trls_own_request_asks_for(separate, sampling):
    with separate() as (seen, ours):
        if sampling.get("logprobs", 0) is None:
            seen.choice = lambda *args: RolloutServer.choice(seen, *args) | {"logprobs": None}
        expected = VLLMClient(base_url=ours.base_url).generate(PROMPTS, **sampling)
        (theirs,) = seen.seen
        seen.seen.clear()
        found = ours.generate(PROMPTS, **sampling)
    n, prompts, seeds = theirs.pop("n"), theirs.pop("prompt"), theirs.pop("seed", None)
    assert len(seen.seen) == len(prompts) * n
    requests = sorted(seen.seen, key=lambda each: (PROMPTS.index(each["prompt"][0]), each.get("seed", 0)))
    for row, request in enumerate(requests):
        wanted = theirs | {"n": 1, "prompt": [prompts[row // n]]}
        assert request == wanted | ({} if seeds is None else {"seed": seeds + row % n})
    if seeds is not None:
        assert found == expected
    sizes = [{name: rows and len(rows) for name, rows in each.items()} for each in (found, expected)]
    assert sizes[0] == sizes[1]
    assert found["prompt_ids"] == PROMPTS


def test_generate_leaves_to_trl_what_cannot_be_split(separate, monkeypatch):
    got = []
    monkeypatch.setattr(VLLMClient, "generate", lambda self, *args, **kwargs: got.append((args, kwargs)) or "trl's")
    kinds = [{"generation_kwargs": each} for each in ({"use_beam_search": True}, {"n": 2})]
    with separate() as (seen, ours):
        for arguments in ({"features": [None] * 3}, *kinds):
            assert ours.generate(PROMPTS, n=2, temperature=0.5, **arguments) == "trl's"
            args, kwargs = got.pop()
            assert args == (PROMPTS, arguments.get("features"))
            assert (kwargs["n"], kwargs["temperature"]) == (2, 0.5)
            assert kwargs["generation_kwargs"] == arguments.get("generation_kwargs")
            assert seen.seen == []


def test_everything_else_is_trls_client(separate):
    with separate() as (_, ours):
        assert ours.base_url.startswith("http://127.0.0.1:") and ours.model == "policy"
        ours.check_server()
        ours.reset_prefix_cache()
        with pytest.raises(AttributeError):
            _ = ours.no_such_thing


def test_rollouts_are_asked_for_with_nothing_of_the_environment(separate, monkeypatch):
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer of-another\nX-Mine: of-another")
    monkeypatch.setenv("OPENAI_ORG_ID", "of-another")
    with separate() as (_, ours):
        sent = {**ours._openai.auth_headers, **ours._openai.default_headers}
    assert "of-another" not in str(sent) and sent["Authorization"] == "Bearer none"


def test_limit_requests_ends_a_request_of_trls_client_that_is_not_answered(tmp_path, tiny_policy, rows, server):
    with server(hold=lambda number: number == 1) as (_, url):
        args = server_config(tmp_path, url, judge_during_generation=False, ddp_timeout=2)
        trainer = RankBufferTrainer(tiny_policy, args, rows)
        client = trainer.vllm_generation.vllm_client
        assert type(client) is VLLMClient
        client.session.mount("http://", HTTPAdapter())  # TRL's own tries again five times, with pauses of a minute
        with pytest.raises(ReadTimeout, match=r"Read timed out. \(read timeout=2\)"):
            client.generate(PROMPTS)
        client.reset_prefix_cache()
        trainer.close()


def test_weights_are_sent_as_they_were_when_they_came(tmp_path, tiny_policy, rows, server, monkeypatch):
    """vLLM packs them after TRL has taken the adapter out again."""
    sent = []
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda client, metadata, weights: sent.append([*weights]))
    with server() as (_, url):
        trainer = RankBufferTrainer(tiny_policy, server_config(tmp_path, url), rows, peft_config=lora())
        for name, weight in trainer.model.named_parameters():
            weight.data += 1e-2 * ("lora" in name)
        trainer.model.merge_adapter()
        merged = [weight.clone() for name, weight in trainer.model.named_parameters() if "lora" not in name]
        trainer.model.unmerge_adapter()
        trainer.vllm_generation.sync_weights()
        trainer.close()
    assert all(torch.equal(weight, other) for (_, weight), other in zip(sent[0], merged, strict=True))


def test_weights_of_importance_that_vanish_are_named(tmp_path, tiny_policy, rows, server, caplog):
    """TRL's default is the product of the ratios of all tokens, each of which top-p makes smaller."""
    with server() as (_, url):
        for more, named in (
            ({"top_p": 0.95}, True),
            ({"top_k": 20}, True),
            ({}, False),
            ({"top_p": 0.95, "vllm_importance_sampling_mode": "token_truncate"}, False),
            ({"top_p": 0.95, "vllm_importance_sampling_correction": False}, False),
        ):
            args = server_config(tmp_path, url, **{"vllm_importance_sampling_correction": True} | more)
            RankBufferTrainer(tiny_policy, args, rows).close()
            assert ("vllm_importance_sampling_mode=sequence_mask multiplies" in caplog.text) == named
            caplog.clear()


def test_old_prefixes_leave_the_server_whatever_it_works_on(caplog):
    asked, kept = [], {"success": False}
    client = SimpleNamespace(
        base_url="http://there", _post=lambda *args, **kwargs: asked.append((args, kwargs)) or kept
    )
    client.update_named_params = lambda metadata, weights: None
    send_copies(client)
    client.reset_prefix_cache()
    assert asked == [(("http://there/reset_prefix_cache",), {"params": {"reset_running_requests": "true"}})]
    assert "keeps prefixes that the policy of an earlier step" in caplog.text
    caplog.clear()
    kept["success"] = True
    client.reset_prefix_cache()
    assert not caplog.text


def test_a_rollout_server_needs_a_context_for_prompt_and_completion(tmp_path, tiny_policy, rows, server, caplog):
    with server(context=40) as (_, url):
        said = r"context of 40 tokens, .*: start it with --max-model-len \d+"
        with pytest.raises(RolloutError, match=said) as error:
            RankBufferTrainer(tiny_policy, server_config(tmp_path / "a", url), rows)
        assert not error.value.passing
    needed = int(str(error.value).partition("--max-model-len ")[2].split()[0])
    for context, said in ((needed, 0), (None, 1)):
        with server(context=context) as (_, url):
            RankBufferTrainer(tiny_policy, server_config(tmp_path / str(context), url), rows).close()
        assert caplog.text.count("does not say whether its context") == said
    with server(context=needed - 1) as (_, url), pytest.raises(RolloutError, match=f"len {needed}\n"):
        RankBufferTrainer(tiny_policy, server_config(tmp_path / "b", url), rows)


@pytest.mark.parametrize("known", ["a,b", ""])
def test_no_proxy_of_the_environment_is_between_a_run_and_its_rollout_server(monkeypatch, caplog, known):
    url = "http://127.0.0.1:8000"
    for name in ("all", "http"):
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
        monkeypatch.delenv(f"{name}_proxy", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, known)
    spare_proxy(url)
    assert os.environ["NO_PROXY"] == known, "there is no proxy"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    spare_proxy("http://rollouts.example:8000")
    assert "add rollouts.example to NO_PROXY" in caplog.text and get_environ_proxies(url)
    spare_proxy(url)
    assert not get_environ_proxies(url) and os.environ["no_proxy"].startswith(known)


def test_known_to_us_holds_for_the_installed_trl(monkeypatch):
    assert known_to_us()
    monkeypatch.setattr(VLLMClient, "generate", other_arguments)
    assert not known_to_us()


# Faults


def test_a_name_that_trl_drops_stops_only_rollouts_from_a_server(monkeypatch):
    monkeypatch.delattr(vllm_client, "parse_logprobs")
    names = runpy.run_module("rankbuffer_trl.training._rollouts")
    with pytest.raises(ImportError, match="parse_logprobs"):
        names["read_rollout"]({"choices": []}, 1)


def test_generate_hands_over_each_rollout_once_and_sends_a_refused_request_again(separate):
    arrived, sampling = [], {"n": 8, "max_tokens": 24, "generation_kwargs": {"seed": 3}}
    with separate(lambda *each: arrived.append(each), fault=lambda number: number % 5 == 1) as (seen, ours):
        found = ours.generate(PROMPTS, **sampling)
        assert len(seen.seen) == 24 + 24 // 4
        assert arrived != sorted(arrived), "the server answers in another order"
        assert sorted(arrived) == [*enumerate(found["completion_ids"])]
        seen.fault = lambda number: False
        assert found == VLLMClient(base_url=ours.base_url).generate(PROMPTS, **sampling)


def test_generate_ends_when_the_server_stays_out(separate):
    with separate(fault=lambda number: number > 3, hold=lambda number: number <= 2) as (seen, ours):
        with pytest.raises(RolloutError, match=f"rollout server at {ours.base_url} does not generate .HTTP 503"):
            ours.generate([[1], [2], [3], [4]], n=1)
        assert seen.idle.wait(EVENT_LIMIT), "the other requests are cancelled"
    assert len(seen.seen) <= 3 + 2 * (RETRIES + 1)


def text(said: str, status: int = 200, kind: str = "application/json", **headers: str) -> web.Response:
    return web.Response(status=status, content_type=kind, text=said, headers=headers)


NOT_OURS, NOT_FINITE = "ValueError: token ids that the policy does not have", "a log-probability that is not finite"
ANSWERS = {  # the cause in the error: what the server says
    r"HTTP 400: the prompt is\ntoo long": lambda: text("the prompt is\ntoo long", 400, "text/plain"),
    "not a completion of vLLM, ValueError": lambda: text('{"choices": []}'),
    "AttributeError: 'NoneType' object has no": lambda: text('{"choices": [null]}'),
    "KeyError: 'prompt_token_ids'": lambda: text('{"choices": [{"logprobs": null}]}'),
    "not a completion of vLLM, JSONDecodeError": lambda: text("{"),
    "not a completion of vLLM, TypeError": lambda: text("hello", kind="text/plain"),
    "not a completion of vLLM, RecursionError": lambda: text("[" * 100_000 + "]" * 100_000),
}
INFINITE = (math.nan, math.inf, -math.inf)
TOP = [{"token_id:5": -1.0}, {"token_id:6": -2.0}]
GOOD = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-1.0, -2.0], "top_logprobs": TOP}
EDITS: list[tuple[str, dict]] = [  # the cause in the error, and what is wrong in a choice of the two tokens 5 and 6
    *((NOT_OURS, {"token_ids": ids}) for ids in (None, "56", {}, [5, -1], [5, 2**40], [5, 50], [5, 6.0], [5, True])),
    *((NOT_OURS, {"prompt_token_ids": ids}) for ids in (None, [50])),
    (NOT_OURS, {"logprobs": GOOD | {"top_logprobs": [TOP[0], TOP[1] | {"token_id:50": -9.0}]}}),
    ("3 tokens, 2 were asked for", {"token_ids": [5, 6, 7], "logprobs": None}),
    ("log-probabilities of 2 tokens for 1", {"token_ids": [5]}),
    *((NOT_FINITE, {"logprobs": GOOD | {"top_logprobs": [TOP[0], {"token_id:6": bad}]}}) for bad in INFINITE),
    (NOT_FINITE, {"logprobs": GOOD | {"token_logprobs": [-1.0, math.inf], "top_logprobs": [None, None]}}),
    ("OverflowError", {"logprobs": GOOD | {"top_logprobs": [TOP[0], {"token_id:6": 10**400}]}}),
    ("AttributeError", {"logprobs": GOOD | {"tokens": [5, 6]}}),
    ("ValueError: the rollout was aborted", {"finish_reason": "abort"}),
]


def test_generate_names_an_answer_that_is_no_rollout_in_one_line(separate):
    arrived = []
    good = {"prompt_token_ids": [1], "token_ids": [5, 6], "logprobs": GOOD, "finish_reason": "length"}
    with separate(lambda *each: arrived.append(each), EVENT_LIMIT, 50) as (seen, ours):

        def answered(say: Callable[[], web.Response]) -> dict:
            seen.say = lambda answer: say()
            return ours.generate([[1]], max_tokens=2)

        for edit in ({}, {"token_ids": [49, 0], "prompt_token_ids": []}, {"logprobs": None}):
            ids = (good | edit)["token_ids"]
            found = answered(lambda edit=edit: web.json_response({"choices": [good | edit]}))
            assert found["completion_ids"] == [ids] and arrived.pop() == (0, ids)
        edited = [(cause, lambda edit=edit: web.json_response({"choices": [good | edit]})) for cause, edit in EDITS]
        for number, (cause, say) in enumerate([*ANSWERS.items(), *edited]):
            with pytest.raises(RolloutError) as error:
                answered(say)
            said = str(error.value)
            assert cause in said and "\n" not in said and len(said) < 600, f"{number}: {said}"
            assert error.value.passing == ("HTTP 400" not in cause)
    assert arrived == []


def test_generate_follows_no_redirect_since_the_prompts_would_travel(server, separate):
    with server() as (elsewhere, other), separate() as (seen, ours):
        seen.say = lambda answer: text("", 307, Location=f"{other}/v1/completions")
        with pytest.raises(RolloutError, match=f"HTTP 307: a redirect to {other}/v1/completions, which is not follow"):
            ours.generate([[1]])
    assert elsewhere.seen == []


def test_generate_ends_when_the_server_is_silent(separate, monkeypatch):
    """The time is over as soon as the other three rollouts are there, whatever the speed of this machine."""
    came, limits = [], []

    def timeout(seconds: float) -> asyncio.Timeout:
        limits.append((seconds, asyncio.timeout(None)))
        return limits[-1][1]

    def arrived(row: int, ids: list[int]) -> None:
        came.append(row)
        if len(came) == 3:
            limits[0][1].reschedule(0)

    monkeypatch.setattr(trainer_module, "asyncio", SimpleNamespace(timeout=timeout, TaskGroup=asyncio.TaskGroup))
    with separate(arrived, 1.0, hold=lambda number: number == 2) as (seen, ours):
        with pytest.raises(RolloutError, match=r"\(3 of 4 rollouts came within rollout_timeout=1 s\): look at its"):
            ours.generate([[1], [2], [3], [4]])
        assert seen.idle.wait(EVENT_LIMIT), "the request that is left is cancelled"
        assert len(ours.generate([[1]])["completion_ids"]) == 1
    assert [seconds for seconds, _ in limits] == [1.0, 1.0]


def test_generate_hands_an_error_to_all_of_several_processes(separate, monkeypatch):
    """The others get the lists by pickle. TRL reads them on all processes."""
    monkeypatch.setattr("rankbuffer_trl.training._rollouts.PartialState", lambda: SimpleNamespace(num_processes=2))
    with separate(timeout=0.2, hold=lambda number: True) as (_, ours):
        made = ours.generate([[1], [2]])
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        with pytest.raises(RolloutError, match="0 of 2 rollouts came"):
            list(made[name])
        with pytest.raises(MainProcessError, match="the main process failed with RolloutError: the rollout server at"):
            list(pickle.loads(pickle.dumps(made[name])))


def test_generate_notices_that_the_machine_of_the_server_is_gone(separate, monkeypatch):
    """The kernel asks a silent connection whether the other side is there. TRL's own client does not."""
    made, found, stock = [], [], trainer_module.keepalive_socket
    monkeypatch.setattr(trainer_module, "keepalive_socket", lambda address: made.append(stock(address)) or made[-1])

    def look(number: int) -> bool:
        (each,) = made
        probes = [each.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE]
        found.append((each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), probes))
        return False

    with separate(hold=look) as (_, ours):
        ours.generate([[1]])
    assert found == [(1, [60, 15, 4])]


@pytest.mark.parametrize(
    ("files", "most"), [(1024, 130), (resource.RLIM_INFINITY, 130), (8, 4)], ids=["many", "no limit", "few"]
)
def test_generate_has_a_rollout_in_flight_for_every_second_file_that_may_be_open(separate, monkeypatch, files, most):
    """No rollout is answered before so many requests are there, and none comes on top of them."""
    arrived, enough = [], asyncio.Event()
    stock = RolloutServer.completions

    async def hold(self, request):
        arrived.append(self.in_flight)
        if len(arrived) == most:
            enough.set()
        await enough.wait()
        return await stock(self, request)

    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    monkeypatch.setattr(RolloutServer, "completions", hold)
    with separate() as (_, ours):
        assert len(ours.generate([[5]], n=130, generation_kwargs={"seed": 3})["completion_ids"]) == 130
    assert max(arrived) <= most


# A whole run


def train(folder, policy, rows, url, judge=None, resume=None, peft=None, **overrides) -> RankBufferTrainer:
    settings = server_config(folder, url, **({"max_steps": 3} | overrides))
    trainer = RankBufferTrainer(policy, settings, rows, judge=judge, peft_config=peft)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        trainer.close()
    return trainer


def outcome(trainer: RankBufferTrainer) -> tuple:
    weights = [parameter.tolist() for parameter in trainer.model.parameters()]
    return contents(Path(trainer.args.output_dir) / LIVE_STORE), weights


def log(trainer: RankBufferTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.fixture(scope="module")
def late(tmp_path_factory, tiny_policy, data_file, server):
    """The outcome of a run that judges after generation, as the others must end."""
    rows, folder = load_queries(str(data_file)), tmp_path_factory.mktemp("late")
    with server() as (seen, url):
        trainer = train(folder, tiny_policy, rows, url, judge_during_generation=False)
        assert [request["n"] for request in seen.seen] == [8] * 3
    assert log(trainer, "judge/hidden") == [0.0] * 3
    assert min(log(trainer, "grad_norm")) > 1e-3, "the weights that are compared have moved"
    return outcome(trainer)


def test_a_run_that_judges_during_generation_ends_the_same(tmp_path, tiny_policy, rows, server, late):
    """Also if some rollouts have to be asked for twice."""
    with server(fault=lambda number: number % 7 == 0) as (seen, url):
        trainer = train(tmp_path / "early", tiny_policy, rows, url)
        assert [request["n"] for request in seen.seen] == [1] * (3 * 24 + 11)
    assert outcome(trainer) == late
    assert max(log(trainer, "judge/hidden")) > 0
    assert min(log(trainer, "rollouts/seconds")) > 0


def lora(**more) -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **more)


def merge_anew(layer, *args, stock=Linear.merge, **kwargs) -> None:
    """Merge as PEFT does with quantised weights."""
    stock(layer, *args, **kwargs)
    layer.get_base_layer().weight = torch.nn.Parameter(layer.get_base_layer().weight.clone(), requires_grad=False)


@pytest.mark.parametrize("kind", ["plain", "dora", "quantised"])
def test_keep_base_exact_leaves_the_base_as_it_is_bit_for_bit(tmp_path, tiny_policy, rows, server, kind, monkeypatch):
    copy = lambda params: {name: weight.detach().clone() for name, weight in params if "lora" not in name}  # noqa: E731
    sent = []
    monkeypatch.setattr(Linear, "merge", merge_anew if kind == "quantised" else Linear.merge)

    def send(client, metadata, params) -> None:
        if not sent:
            sent.append({})
            next(params)
            raise ConnectionError("the server went away in the middle")
        sent.append(copy(params))

    monkeypatch.setattr(VLLMClient, "update_named_params", send)
    with server() as (_, url):
        args = server_config(tmp_path, url, model_init_kwargs={"dtype": "bfloat16"})
        trainer = RankBufferTrainer(tiny_policy, args, rows, peft_config=lora(use_dora=kind == "dora"))
        base = copy(trainer.model.named_parameters())
        for _ in range(10):
            for name, weight in trainer.model.named_parameters():
                weight.data += 1e-2 * torch.randn_like(weight) * ("lora" in name)
            with suppress(ConnectionError):
                trainer.vllm_generation.sync_weights()
        trainer.close()
    after = copy(trainer.model.named_parameters())
    assert after.keys() == base.keys() and all(torch.equal(after[name], base[name]) for name in base)
    assert any(not torch.equal(sent[8][name], sent[9][name]) for name in sent[9]), "the adapter was sent"


@pytest.mark.slow
def test_a_resumed_run_with_an_adapter_ends_the_same(tmp_path, tiny_policy, rows, server):
    settings = dict(max_steps=6, save_strategy="steps", save_steps=3, model_init_kwargs={"dtype": "bfloat16"})
    with server() as (_, url):
        whole = train(tmp_path / "whole", tiny_policy, rows, url, peft=lora(), **settings)
        shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
        resumed = train(tmp_path / "resumed", tiny_policy, rows, url, peft=lora(), resume=True, **settings)
    assert outcome(resumed) == outcome(whole)


def test_an_evaluation_is_judged_during_its_generation(tmp_path, tiny_policy, rows, server):
    found = []
    for early in (False, True):
        folder = tmp_path / str(early)
        with server() as (seen, url):
            sizes = dict(per_device_eval_batch_size=8, num_generations_eval=4)
            args = server_config(folder, url, judge_during_generation=early, **sizes)
            trainer = RankBufferTrainer(tiny_policy, args, rows, rows.select(range(4)))
            metrics = trainer.evaluate()
            trainer.close()
            assert len(seen.seen) == (16 if early else 2)
        found.append((contents(folder / LIVE_STORE), metrics["eval_rewards/rank_reward/std"]))
    assert found[0] == found[1] and {row[1] for row in found[0][0]["calls"]} == {"eval"}
    assert not any(found[0][0][table] for table in ("responses", "buffers", "groups"))


def test_a_run_ends_when_the_server_generates_what_the_policy_does_not_have(tmp_path, tiny_policy, rows, server):
    vocabulary = AutoConfig.from_pretrained(tiny_policy).vocab_size
    with server() as (seen, url):

        def choice(*args) -> dict:
            made, first = RolloutServer.choice(seen, *args), vocabulary - (len(seen.seen) <= 24)
            return made | {"token_ids": [first, *made["token_ids"][1:]]}

        seen.choice = choice
        with pytest.raises(RolloutError, match=r"not a completion of vLLM, ValueError: token ids that"):
            train(tmp_path, tiny_policy, rows, url)
    assert {row[1] for row in contents(tmp_path / LIVE_STORE)["groups"]} == {0}, "nothing of the second step is kept"


class Editing(RankBufferTrainer):
    """A trainer whose reward functions get another text than the server generated."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        edited = [completion_ids[1], *completion_ids[1:]]
        return super()._calculate_rewards(inputs, prompts, completions, edited)


def test_the_texts_of_the_reward_functions_decide(tmp_path, tiny_policy, rows, server):
    found = []
    for early in (False, True):
        folder = tmp_path / str(early)
        with server() as (_, url):
            args = server_config(folder, url, judge_during_generation=early, max_steps=2)
            trainer = Editing(tiny_policy, args, rows)
            trainer.train()
            trainer.close()
        found.append(outcome(trainer))
    tables = ("responses", "buffers", "groups")
    assert [found[0][0][table] for table in tables] == [found[1][0][table] for table in tables]
    assert found[0][1] == found[1][1]


# TRL goes another way


def other_arguments(self, prompts, n=1, more=0, stock=VLLMClient.generate, **kwargs):
    """TRL's `generate` with an argument that we do not know."""
    return stock(self, prompts, n=n, **kwargs)


def another_way(self, prompts, images, num_generations, profiler=None):
    """TRL's generation, past the method that we replaced."""
    settings = {"generation_kwargs": self.generation_kwargs, "max_tokens": self.max_completion_length}
    made = VLLMClient.generate(self.vllm_client, prompts[::num_generations], n=num_generations, **settings)
    return made["prompt_ids"], made["completion_ids"], made["logprobs"], made["logprob_token_ids"]


def test_a_trl_that_generates_past_its_client_is_left_alone(tmp_path, tiny_policy, rows, server, late, monkeypatch):
    """Judging starts after generation then, as `judge/hidden` in the log shows."""
    monkeypatch.setattr(VLLMGeneration, "generate", another_way)
    with server() as (seen, url):
        trainer = train(tmp_path / "early", tiny_policy, rows, url)
        assert [request["n"] for request in seen.seen] == [8] * 3
    assert outcome(trainer) == late


def test_separate_rollouts_leaves_trls_client_where_it_cannot_take_its_place(
    tmp_path, tiny_policy, rows, server, monkeypatch, caplog
):
    """And a trainer is closed as often as one likes."""
    caplog.set_level(logging.WARNING, logger=trainer_module.__name__)

    def client_of(**given):
        trainer = RankBufferTrainer(tiny_policy, server_config(tmp_path, url, rollout_timeout=7.5), rows, **given)
        trainer.close()
        trainer.close()
        return trainer.vllm_generation.vllm_client

    with server() as (_, url):
        assert type(client_of(rollout_func=lambda prompts, trainer: {})) is VLLMClient
        ours = client_of()
        assert type(ours) is SeparateRollouts and ours._timeout == 7.5 and not caplog.records
        monkeypatch.setattr(VLLMClient, "generate", other_arguments)
        assert type(client_of()) is VLLMClient
    (warning,) = [record.message for record in caplog.records if record.name == trainer_module.__name__]
    assert "other arguments than RankBuffer knows" in warning


# Interrupts


@contextmanager
def interruptible(number: int) -> Iterator[Callable[[], None]]:
    """Give a function that sends a signal to this thread, once."""
    main, left = threading.main_thread().ident, [1]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT

    def interrupt() -> None:
        if left:
            left.pop()
            signal.pthread_kill(main, number)

    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_leaves_nothing_in_flight_and_the_resumed_run_ends_as_if_nothing_had_been(
    tmp_path, tiny_policy, rows, server, late, number
):
    """Ctrl-C and SIGTERM end a step that waits for rollouts and for early judgments."""
    in_flight, settings = [], {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}

    async def hold(asked):
        if len(rollouts.seen) > 24:
            in_flight.append(asked)
            asked.tally.attempts += 1
            try:
                check()
                await asyncio.Event().wait()
            finally:
                in_flight.remove(asked)

    def check(number: int = 24 + 10) -> bool:
        if number > 24 + 9 and in_flight and rollouts.in_flight >= 24 - 9:
            interrupt()
        return number > 24 + 9

    with interruptible(number) as interrupt, server(hold=check) as (rollouts, url):
        with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext():
            train(tmp_path / "run", tiny_policy, rows, url, Judge(Embedded(before=hold)), **settings)
        assert rollouts.idle.wait(EVENT_LIMIT), f"{rollouts.in_flight} rollouts are in flight"
        assert not in_flight
    store = contents(tmp_path / "run" / LIVE_STORE)
    assert {row[1] for row in store["groups"]} == {0}
    assert any("cancelled" in row for row in store["calls"]), "what was asked early is in the ledger"
    with server() as (rollouts, url):
        resumed = train(tmp_path / "run", tiny_policy, rows, url, Judge(Embedded()), resume=True, **settings)
        assert len(rollouts.seen) == 2 * 24
    assert outcome(resumed) == late
