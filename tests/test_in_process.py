"""A judge in this process gives verdicts and probabilities, and trains a step without a server."""

import asyncio
import json
import math
import shutil
from dataclasses import replace
from itertools import permutations, product
from string import printable

import pytest
import torch
from helpers.visits import ask_for
from transformers import AutoTokenizer

from rankbuffer_tools import in_process
from rankbuffer_tools.batch.chat import Chat
from rankbuffer_tools.in_process import TransformersJudge, impose, load, reader
from rankbuffer_trl import Judge
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.judge import _verdicts as verdicts
from rankbuffer_trl.judge import insertion_question, pairwise_question, pointwise_question, ranking_question

QUERY = ask_for("q")
TEXTS = [f"text {i}" for i in range(12)]


@pytest.fixture(scope="module")
def model(tiny_policy, tmp_path_factory) -> str:
    """The folder of the untrained policy with room for a prompt."""
    folder = shutil.copytree(tiny_policy, tmp_path_factory.mktemp("judge") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return str(folder)


def ask(folder, *questions):
    judge = Judge(TransformersJudge(folder), max_attempts=1)
    return asyncio.run(judge.ask_all(questions)), judge.calls


def test_every_question_gets_a_verdict_that_an_untrained_model_would_not_say(model):
    rollouts = [Rollout(i, text) for i, text in enumerate(TEXTS)]
    questions = [insertion_question(QUERY, TEXTS, "x"), insertion_question(QUERY, TEXTS[:4], "x", False)]
    questions += [pairwise_question(QUERY, *TEXTS[:2]), pointwise_question(QUERY, "x")]
    questions += [ranking_question(QUERY, rollouts[:n]) for n in (2, 3, 8)]
    questions.append(replace(questions[0], kind="scores", verdict=verdicts.scores_verdict(3)))
    found, calls = ask(model, *questions)
    assert None not in found and {call.outcome for call in calls} == {"parsed"}
    assert {(call.attempts, call.server, call.usage.cached) for call in calls} == {(1, "", 0)}
    assert all(call.usage.prompt > 50 and call.usage.completion > 2 for call in calls)
    assert ask(model, *questions)[0] == found
    torch.backends.cuda.enable_cudnn_sdp(True)
    load.cache_clear()
    load(model, None, "auto")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


ANSWERS = [
    (verdicts.position_verdict(12), [{"position": p} for p in range(13)]),
    (verdicts.winner_verdict(["A", "B", "tie"]), [{"winner": each} for each in ("A", "B", "tie")]),
    (verdicts.scores_verdict(2), [{"scores": [*each]} for each in product(range(11), repeat=2)]),
    (verdicts.order_verdict([0, 3, 11]), [{"order": [*each]} for each in permutations([0, 3, 11])]),
]


@pytest.mark.parametrize(("verdict", "answers"), ANSWERS, ids=["position", "winner", "scores", "order"])
def test_reader_takes_the_beginnings_of_verdicts_alone(verdict, answers):
    fits, texts = reader(verdict), [json.dumps(answer) for answer in answers]
    begun = {text[:end] for text in texts for end in range(len(text) + 1)}
    assert all(map(fits, begun))
    assert not [text + more for text in begun for more in printable if text + more not in begun and fits(text + more)]


def test_impose_gives_the_likeliest_of_the_possible_tokens_and_their_probabilities(model):
    tokenizer, network = load(model, None, "auto")
    ids = tokenizer("Which is better?", return_tensors="pt")["input_ids"]
    verdict = verdicts.score_verdict(10)
    reply = impose(tokenizer, network, ids, verdict)
    places = reply.logprobs["content"]
    made = [tokenizer(place["token"], add_special_tokens=False)["input_ids"] for place in places]
    whole = torch.tensor([[*ids[0].tolist(), *(id for each in made for id in each)]])
    if all(len(each) == 1 for each in made):  # the cache changes nothing
        with torch.inference_mode():
            logprobs = network(whole).logits[0].log_softmax(-1)
        for n, (place, (id,)) in enumerate(zip(places, made, strict=True), start=ids.shape[1] - 1):
            assert place["logprob"] == pytest.approx(float(logprobs[n, id]), abs=1e-4)
    for place in places:
        assert place["logprob"] == max(each["logprob"] for each in place["top_logprobs"])
    (reading,), _ = ask(model, replace(pointwise_question(QUERY, "x", most=9), soft=True))
    assert math.isclose(sum(reading.chances.values()), 1) and len(set(reading.chances.values())) == 10
    assert 0 < reading.outside < 1 and reading.shared == 0


def all_of_it(text: str, cut_off: bool) -> str:
    return text


def test_a_chat_without_a_verdict_is_answered_freely_and_by_its_seed(model):
    def free(**request):
        chat = Chat("rubrics", "q", [{"role": "user", "content": "How?"}], all_of_it, {"max_tokens": 5} | request)
        torch.manual_seed(torch.randint(9999, ()).item())
        state = torch.random.get_rng_state()
        (text,), (call,) = ask(model, chat)
        assert torch.equal(torch.random.get_rng_state(), state), "a run that resumes goes on as it would have"
        assert 1 <= call.usage.completion <= 5
        return text

    warm = [free(temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)]
    assert warm[0] == warm[1] and len(set(warm)) > 1 and free() == free(seed=3)


def test_no_question_touches_the_random_state_of_a_training_beside_it(model, monkeypatch):
    monkeypatch.setattr(torch.random, "fork_rng", None)  # it sets the state back, while the training draws from it
    monkeypatch.setattr(torch, "manual_seed", None)
    load(model, None, "auto")
    chats = [
        Chat("rubrics", "q", [{"role": "user", "content": "How?"}], all_of_it, {"max_tokens": 5} | more)
        for more in ({}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5})
    ]
    assert None not in ask(model, pointwise_question(QUERY, "x"), *chats)[0]


def test_a_sampler_draws_by_the_temperature_among_the_tokens_that_are_left():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(4000, 4)
    steps = in_process.sampler({"temperature": 2.0, "top_k": 3}, 1, torch.device("cpu"))
    shares = torch.bincount(steps(torch.zeros(4000, 1).long(), logits).argmax(-1), minlength=4) / 4000
    weights = torch.tensor([0, *(math.exp(each / 2) for each in (1, 2, 3))])
    assert shares[0] == 0 and torch.allclose(shares, weights / weights.sum(), atol=0.03)


def test_a_judge_whose_logits_are_nan_gives_no_verdict(model, monkeypatch):
    """The first possible token would win everywhere, and a reward would follow the number of its rollout."""
    _, network = load(model, None, "auto")
    for broken in (math.nan, -math.inf):
        size = (1, 1, network.config.vocab_size)
        monkeypatch.setattr(network.lm_head, "forward", lambda hidden, to=broken, size=size: torch.full(size, to))
        (verdict,), (call,) = ask(model, pointwise_question(QUERY, "x"))
        assert verdict is None and (call.outcome, "float32" in call.error) == ("unreachable", True)


def test_a_fault_is_one_line(tiny_policy, model, tmp_path, monkeypatch):
    long = insertion_question(QUERY, ["word " * 99, "x"], "y")
    _, (call,) = ask(tiny_policy, long)
    assert call.outcome == "unreachable" and "tokens do not fit into its context of" in call.error
    with pytest.raises(ExceptionGroup) as error:
        ask(str(tmp_path / "none"), long)
    assert isinstance(error.value.exceptions[0], SettingsError) and "cannot be loaded" in str(error.value.exceptions)
    base, tokenizer = shutil.copytree(model, tmp_path / "base"), AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    (base / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(base)
    wrong = {(model, "gpu", "auto"): "cannot be loaded on gpu: ", (model, "cpu", "float8"): "no dtype 'float8'"}
    for arguments, said in (wrong | {(str(base), "cpu", "auto"): "has no chat template"}).items():
        with pytest.raises(SettingsError, match=said):
            load.__wrapped__(*arguments)
    for name in ("tokenize", "return_dict", "add_generation_prompt", "truncation"):
        with pytest.raises(SettingsError, match=f"template must not set {name}"):
            TransformersJudge(model, template={"enable_thinking": False, name: False})
    monkeypatch.setattr(in_process, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(SettingsError, match="ZeRO-3: serve it"):
        load.__wrapped__(model, None, "auto")


def test_a_training_step_takes_its_rewards_from_it(training, model):
    judge = {"judge_client": "rankbuffer_tools.in_process.TransformersJudge", "judge_client_args": {"model": model}}
    trainer = training(max_steps=1, method="rankbuffer_soft", **judge)
    trainer.train()
    totals = trainer.store.totals()
    assert totals.calls > 12 and totals.failures == 0 and totals.malformed == 0
    assert trainer.run_state.facts()["judge_args"] == {"model": "model"}, "no path in a checkpoint"
    assert trainer.state.log_history[0]["rewards/rank_reward/std"] > 0
