"""Responses: in process, from a server that is started and ended, over adapters; and what is read out of them."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from aiohttp import web
from conftest import ROOT
from helpers.evaluation_assets import Loopback
from helpers.launching import alive
from helpers.nectar_rows import Model
from helpers.servers import served
from httpx import ConnectError, Request, Response
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoTokenizer, GenerationConfig

from evaluation.benchmark import CHATML_MARKERS, THINKING, OutputError, Prompt, without_markers
from evaluation.config import EvaluationConfig
from evaluation.generate import has_outputs
from rankbuffer_tools.batch import engines
from rankbuffer_tools.batch.answers import AnswerError, answer_in, opens_thinking, read_answers
from rankbuffer_tools.batch.ask import AnswerLog
from rankbuffer_tools.batch.engines import (
    EngineError,
    TransformersEngine,
    VllmEngine,
    base_of,
    engine,
    hub_fault,
    vllm_server,
)
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError, Totals

PROMPTS = [Prompt(f"p{i}", [{"role": "user", "content": f"How do I boil {i} eggs?"}]) for i in range(5)]


def config(model: str, **changes) -> EvaluationConfig:
    values = dict(models=[f"mine={model}"], engine="transformers", max_new_tokens=6, engine_batch_size=2)
    return EvaluationConfig(**(values | changes))


def test_transformers_engine_repeats_with_the_same_seed_over_interruptions(tiny_policy, tmp_path):
    settings = config(tiny_policy)
    torch.backends.cuda.enable_cudnn_sdp(True)
    made = TransformersEngine(tiny_policy, None, settings)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    answers = made.respond(PROMPTS, tmp_path / "a.jsonl", "")
    assert not answers.cut_at(7) and answers.cut_at(1) == {*answers.values}
    first = answers.values
    assert list(first) == [prompt.id for prompt in PROMPTS] and len(set(first.values())) > 1
    (tmp_path / "b.jsonl").write_text("".join((tmp_path / "a.jsonl").read_text().splitlines(True)[:3]))
    assert made.respond(PROMPTS, tmp_path / "b.jsonl", "").values == first
    with AnswerLog(tmp_path / "b.jsonl") as log:
        assert len(log.calls) == len(PROMPTS) and 0 < Totals.of(log.calls).completion_tokens <= 6 * len(PROMPTS)
    penalty = shutil.copytree(tiny_policy, tmp_path / "m")
    GenerationConfig.from_pretrained(penalty, repetition_penalty=9.0).save_pretrained(penalty)
    same = TransformersEngine(str(penalty), None, settings).respond(PROMPTS, tmp_path / "c.jsonl", "").values
    assert same == first, "a penalty of the model's own counts no more than in training"
    other = TransformersEngine(tiny_policy, None, config(tiny_policy, seed=1))
    assert other.respond(PROMPTS, tmp_path / "a.jsonl", "").values != first, "another seed asks again"
    greedy = [
        TransformersEngine(tiny_policy, None, config(tiny_policy, temperature=0.0, seed=seed))
        .respond(PROMPTS[:2], tmp_path / f"{seed}.jsonl", "")
        .values
        for seed in (0, 1)
    ]
    assert greedy[0] == greedy[1], "a temperature of 0 is greedy"
    with pytest.raises(SettingsError, match="there is no folder nobody/none here, and the Hub"):
        TransformersEngine("nobody/none", None, settings)
    (tmp_path / "config.json").touch()
    with pytest.raises(EngineError, match="no tokenizer for"):
        TransformersEngine(str(tmp_path), None, settings)


def test_transformers_engine_pads_without_a_padding_token_and_wants_a_template(tiny_policy, tmp_path):
    path, tokenizer = shutil.copytree(tiny_policy, tmp_path / "m"), AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    assert TransformersEngine(str(path), None, config(str(path))).respond(PROMPTS, tmp_path / "a.jsonl", "")
    tokenizer.chat_template = None
    (path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(path)
    with pytest.raises(EngineError, match="m has no chat template"):
        TransformersEngine(str(path), None, config(str(path)))


def test_transformers_engine_answers_with_an_adapter_unlike_its_model(tiny_policy, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules="all-linear")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_policy), lora)
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=3.0)
    adapted.save_pretrained(tmp_path / "adapter")
    path = str(tmp_path / "adapter")
    assert base_of(tiny_policy) is None and base_of(path) == tiny_policy
    for missing in (f"{path}/none", "./none", "runs/a/none"):
        with pytest.raises(SettingsError, match=f"there is no folder {missing}"):
            base_of(missing)
    for saved in ("checkpoint-8", "checkpoint-24"):  # a run that saved no policy at its end
        (tmp_path / "run" / saved).mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"holds no model: name a checkpoint .*checkpoint-24$"):
        base_of(str(tmp_path / "run"))
    settings = config(tiny_policy, temperature=0.0)
    log = tmp_path / "log"
    plain, lora = engine(settings, "plain", tiny_policy, None, log), engine(settings, "lora", path, tiny_policy, log)
    with plain as plain, lora as lora:
        texts = [each.respond(PROMPTS, tmp_path / f"{i}.jsonl", "").values for i, each in enumerate((plain, lora))]
    assert texts[0] != texts[1]


def program(folder: Path, body: str) -> str:
    """An executable that is called as vLLM would be."""
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\nimport sys\narguments = sys.argv[1:]\n{textwrap.dedent(body)}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


SERVE = """
import http.server, json, os, pathlib, subprocess
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("FOLDER/seen.json").write_text(json.dumps([arguments, os.getpid(), child.pid]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


ANSWER = """
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = [{"token": "Hi", "logprob": -0.5, "of": asked["model"] if APPLIED else ""}]
        body = json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message"""


@pytest.mark.parametrize("applied", [True, False])
def test_vllm_server_that_does_not_apply_an_adapter_is_named(tmp_path, applied, caplog):
    answer = ANSWER.replace("APPLIED", str(applied))
    path = program(tmp_path, SERVE.replace("FOLDER", str(tmp_path)).replace("    def log_message", answer[1:]))
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/base"}'
    )
    words = [path, "serve"], [], "mine", str(tmp_path), "org/base", tmp_path / "log"
    with vllm_server(*words):
        assert ("exactly as org/base does" in caplog.text) != applied
    _, *pids = json.loads((tmp_path / "seen.json").read_text())
    assert all(map(has_ended, pids))


def following(arguments: list[str], *names: str) -> list[str]:
    return [arguments[arguments.index(name) + 1] for name in names]


def test_hub_fault_asks_once_and_leaves_to_the_libraries_what_they_say_better(monkeypatch):
    answer = Response(404, request=Request("HEAD", "http://hub"))
    faults = {
        RepositoryNotFoundError("", response=answer): "the Hub has no repository of that name",
        ConnectError("away"): "the Hub cannot be asked for a repository of that name: away",
        GatedRepoError("", response=answer): "",
        RemoteEntryNotFoundError("", response=answer): "",
        HfHubHTTPError("", response=answer): "",
    }
    for error, said in faults.items():
        monkeypatch.setattr(engines, "get_hf_file_metadata", asked := Mock(side_effect=error))
        fault = hub_fault("nobody/none")
        assert fault.startswith(said) and bool(fault) == bool(said) and asked.call_count == 1
    monkeypatch.setattr("transformers.utils.find_adapter_config_file", Mock(side_effect=AssertionError("asked again")))
    assert base_of("two words") is None and hub_fault("two words").startswith("the Hub cannot be asked")
    monkeypatch.setattr(engines, "try_to_load_from_cache", lambda *_, **__: "config.json")
    assert not hub_fault("nobody/none") and asked.call_count == 1, "the cache has it"


def test_a_model_of_the_hub_is_another_one_with_each_commit(tmp_path, monkeypatch):
    repository = tmp_path / "models--a--b"
    (repository / "refs").mkdir(parents=True)
    monkeypatch.setattr(engines, "try_to_load_from_cache", partial(try_to_load_from_cache, cache_dir=tmp_path))
    for commit in ("one", "two"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs" / "main").write_text(commit)
        assert engines.model_identity("a/b") == f"a/b {commit}"
    assert [engines.model_identity(name) for name in ("b/a", str(tmp_path))] == ["b/a", str(tmp_path)]


@pytest.mark.parametrize("rank", [None, 4, 33])
def test_vllm_server_is_started_for_a_model_or_an_adapter_and_ended_with_its_children(tmp_path, rank):
    path, model = program(tmp_path, SERVE.replace("FOLDER", str(tmp_path))), "org/model"
    if rank:
        settings = {"peft_type": "LORA", "r": rank, "base_model_name_or_path": "org/base"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        model = str(tmp_path)
    words = [path, "serve"], ["--tensor-parallel-size=2"], "mine", model, base_of(model), tmp_path / "log"
    with vllm_server(*words) as url:
        arguments, *pids = json.loads((tmp_path / "seen.json").read_text())
    assert arguments[:2] == ["serve", "org/base" if rank else model] and arguments[-1] == "--tensor-parallel-size=2"
    (port,) = following(arguments, "--port")
    assert url == f"http://127.0.0.1:{port}/v1"
    assert int(port) < 32768, "an outgoing connection could take it before the server does"
    if rank:
        assert "--enable-lora" in arguments
        found = following(arguments, "--lora-modules", "--max-lora-rank")
        assert found == [f"mine={tmp_path}", {4: "16", 33: "64"}[rank]]
    else:
        assert following(arguments, "--served-model-name", "--host") == ["mine", "127.0.0.1"]
    for pid in pids:
        assert has_ended(pid)


@pytest.mark.slow
def test_vllm_server_does_not_outlive_a_run_that_is_killed(tmp_path):
    path = program(tmp_path, SERVE.replace("FOLDER", str(tmp_path)))
    code = f"""
from pathlib import Path
from rankbuffer_tools.batch.engines import vllm_server
with vllm_server([{path!r}], [], "mine", "m", None, Path({str(tmp_path / "log")!r})):
    print("ready", flush=True)
    input()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout.readline() == "ready\n"
        _, server, child = json.loads((tmp_path / "seen.json").read_text())
        run.kill()
        run.wait(20)
        assert has_ended(server)
        os.kill(child, signal.SIGKILL)
    finally:
        run.kill()
        run.communicate(timeout=20)


def has_ended(pid: int) -> bool:
    """Wait until a process that was killed is gone. SIGKILL returns before the process has ended."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        os.sched_yield()
    return not alive(pid)


def test_vllm_server_says_why_it_does_not_start(tmp_path):
    for path, fault in (
        (program(tmp_path, "sys.exit('out of memory')"), r"ended with status 1(?s:.*)out of memory"),
        ("no-such-vllm", r"cannot start 'no-such-vllm'.*engine: transformers"),
    ):
        with pytest.raises(EngineError, match=fault), vllm_server([path], [], "mine", "m", None, tmp_path / "l" / "l"):
            pass


def test_vllm_engine_refuses_prompts_without_a_response_and_keeps_the_others(tmp_path):
    broken = [True]
    server = Loopback(lambda body, text: 400 if broken[0] and "3 eggs" in str(body["messages"]) else text)
    with served(server.app) as url:
        made = VllmEngine(f"{url}/v1", "model", "m", config("m", engine="vllm"))
        with pytest.raises(EngineError, match=r"1 of 5 prompts have no response.*p3.*HTTP 400"):
            made.respond(PROMPTS, tmp_path / "log.jsonl", "x")
        asked, broken[0] = server.asked.total(), False
        assert len(made.respond(PROMPTS, tmp_path / "log.jsonl", "x").values) == 5
        assert server.asked.total() == asked + 1
        made = VllmEngine(f"{url}/v1", "model", "m", config("m", engine="vllm", max_new_tokens=100_000))
        with pytest.raises(JudgeError, match="100,000 tokens is too small"):
            made.respond(PROMPTS, tmp_path / "other.jsonl", "x")
    assert server.asked.total() == asked + 1, "before it generates"
    half = {"choices": [{"message": {"content": "Half a"}, "finish_reason": "content_filter"}]}
    with served(Model(lambda *_: web.json_response(half)).app()) as url:
        made = VllmEngine(f"{url}/v1", "writer", "m", config("m", engine="vllm"))
        assert [*made.respond(PROMPTS, tmp_path / "half.jsonl", "x").values.values()] == ["Half a"] * 5


def test_answer_in_is_what_follows_the_thinking():
    for text, opened, answer in (
        ("<think>\nhm\n</think>\n\nTea.", False, "Tea."),
        ("hm\n</think>\n\nTea.", True, "Tea."),
        ("hm\n</think>\n\nTea.", False, "Tea."),
        ("<think>a</think><think>b</think>Tea.", False, "Tea."),
        ("<think>hm, and on and on", False, ""),
        ("[THINK]hm[/THINK]Tea.", False, "Tea."),
        ("<seed:think>hm</seed:think>\nTea with </reasoning>.", False, "Tea with </reasoning>."),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Tea.", False, "Tea."),
        ("<|channel>thought\nhm<channel|>Tea.", False, "Tea."),
        ("<unused94>thought\nhm<unused95>Tea.", False, "Tea."),
        ("<|channel>thought\nhm, and on", False, ""),
        ("hm, and on and on", True, ""),
        (" Tea. ", False, "Tea."),
        ("", False, ""),
    ):
        assert answer_in(text, opened) == answer, (text, opened)


def test_read_answers_notices_a_server_that_keeps_the_thinking_to_itself():
    with pytest.raises(AnswerError, match="--reasoning-parser"):
        read_answers({"a": "Tea.", "b": "Milk."}, True, "x")
    assert read_answers({"a": "Tea.", "b": "hm</think>Milk."}, True, "x") == {"a": "", "b": "Milk."}


def test_read_answers_refuses_tags_that_it_does_not_know_unless_a_setting_reads_them():
    for tagged, check in (
        ("<scratchpad>hm</scratchpad>Tea.", "<scratchpad>.*?</scratchpad>(?P<answer>.*)"),
        ("[PLAN]hm[/PLAN] Tea.", r"\[PLAN\].*\[/PLAN\](?P<answer>.*)"),
        ("analysisHm.assistantfinalTea.", "analysis.*?assistantfinal(?P<answer>.*)"),
        ("<answer>\nTea.\n</answer>", "<answer>(?P<answer>.*)</answer>"),
        ("<|START_RESPONSE|>Tea.<|END_RESPONSE|>", r"<\|\w+\|>(?P<answer>.*)<\|\w+\|>"),
        ("Tea.<|im_end|>\n<|im_start|>user\nThanks", r"(?P<answer>.*?)<\|im_end\|>.*"),
    ):
        texts = {"a": tagged, "b": tagged, "c": "Milk.", "d": ""}
        with pytest.raises(AnswerError, match="2 of 3 begin with a tag"):
            read_answers(texts, False, "x")
        assert read_answers(texts, False, "x", "none") == texts
        assert read_answers(texts, False, "x", check) == {"a": "Tea.", "b": "Tea.", "c": "", "d": ""}
        few = {"a": tagged, "b": "Milk.", "c": "<p> is a tag."}
        assert read_answers(few, False, "x") == few
    cut = {"a": "hm</think>Tea.", "b": "hm</think>Milk.", "c": "hm and"}
    assert read_answers(cut, False, "x")["c"] == "", "most start inside a thought, whatever the template says"


class Kept:
    """A benchmark that has outputs."""

    def read_outputs(self, folder, label) -> dict:
        return {"a": "<thinking>hm</thinking>Tea."}


def test_has_outputs_refuses_tags_from_elsewhere_and_another_reading(tmp_path):
    with pytest.raises(AnswerError, match="outputs from elsewhere: 1 of 1 begin with a tag"):
        has_outputs(Kept(), tmp_path, "mine")
    assert has_outputs(Kept(), tmp_path, "mine", "none")
    (tmp_path / "generation.json").write_text("{}")
    assert has_outputs(Kept(), tmp_path, "mine")
    with pytest.raises(OutputError, match="another output_dir"):
        has_outputs(Kept(), tmp_path, "mine", "think")


def test_without_markers_breaks_up_markers_and_nothing_else():
    for marker in CHATML_MARKERS + THINKING:
        broken = without_markers(f"a {marker} b")
        assert marker not in broken and broken.replace("< ", "<") == f"a {marker} b"
    plain = "x < y, a[INST]b"
    assert without_markers(plain) == plain


class Template:
    def __init__(self, end: str):
        self.end = end

    def apply_chat_template(self, messages, **kwargs):
        return f"user{self.end}" if kwargs.get("enable_thinking", True) else "user"


def test_opens_thinking_knows_templates_that_do():
    assert opens_thinking(Template("<think>\n"), {})
    assert not opens_thinking(Template("<think>\n"), {"enable_thinking": False})
    assert opens_thinking(Template("[THINK]"), {})
    assert not opens_thinking(Template("<think>\n\n</think>\n\n"), {})
