"""Run this package and others against one fake judge with faults, and count what each makes of a failed judgment.

    make peers                                      # all rows, in an environment of their own
    python benchmarks/peers.py --rows rankbuffer-trl trl      # without that environment

The fake judge knows the hidden order of all texts, and looks at it with an error. It takes its time, and some of its
answers are malformed or an HTTP 500. Each row judges the same groups; its first step is not counted. The floor is what
the judge alone needs for the answers in order that it gave: their seconds over its places, or the longest of them.

The script prints a table, and then one JSON line. A question was never answered if its last answer was a fault. A
rollout of such a question is lost (it has no reward), or rewarded in spite, from what else the row knows or invents.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, redirect_stdout
from functools import partial
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import loopback
from aiohttp import web
from openai import OpenAI
from rich.console import Console
from rich.table import Column, Table

from rankbuffer_tools.batch.recipes import find_recipe, read_recipe
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.judge.config import OpenAIClient
from rankbuffer_trl.monitoring import tau_b
from rankbuffer_trl.rewards import load_method
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training import GroupScorer

G, WORDS, PLACES = 8, 300, 64
SPREAD, ERROR, LIST_ERROR = 0.25, 0.09, 0.135  # of the quality in a group, of a look, and of a look at many texts
TAG = re.compile(r"\bq\d+s\d+r\d+\b")  # a query, a step and a rollout: each text begins with its own
TOKEN = re.compile(r"\w+|[^\w\s]")
PROSE = "Each of the 3 rubrics is met in part."
ANALYSIS = "Both follow the task, and both leave something out. " * 3
EXPLANATION = "It answers the question, with a gap that a careful reader notices in its second half. " * 3
Step = Callable[[list[RolloutGroup]], Sequence[Sequence[float | None]]]


def quality(tag: str) -> float:
    """Return the hidden quality of a text."""
    return random.Random(tag).gauss(0, SPREAD)


def scaled(middle: float, slope: float, values: list[float], digits: int | None = None) -> list[float]:
    return [round(min(max(middle + slope * value, 0), 2 * middle), digits) for value in values]


def verdict(text: str, tags: list[str], prefilled: str) -> tuple[str, list[float]]:
    """Answer a prompt in the form that it asks for. llm-verifier also reads the probability of each of 20 letters."""
    look = random.Random(text + prefilled)
    seen = [quality(tag) + look.gauss(0, LIST_ERROR if len(tags) > 2 else ERROR) for tag in tags]
    if "<score_A>" in text and prefilled:
        mean = 9.5 - 8 * seen["<score_B>" in prefilled.splitlines()[-1]]
        weights = [math.exp(-(((i - mean) / 1.5) ** 2) / 2) + 1e-9 for i in range(20)]
        return chr(65 + weights.index(max(weights))), [weight / sum(weights) for weight in weights]
    if "<score_A>" in text:
        return ANALYSIS, []
    if '{"position"' in text:
        return json.dumps({"position": sum(each < seen[-1] for each in seen[:-1])}), []
    if ids := re.search(r"permutation of\s+(\[.*?\])", text):
        return json.dumps({"order": [id for _, id in sorted(zip(seen, json.loads(ids[1]), strict=True))]}), []
    if '{"winner"' in text:
        return json.dumps({"winner": "tie" if abs(seen[0] - seen[1]) < 0.03 else "AB"[seen[1] > seen[0]]}), []
    if '{"scores"' in text:
        return json.dumps({"scores": scaled(50, 40, seen)}), []
    if "<trajectory id=" in text:
        scores = enumerate(scaled(0.5, 0.4, seen, digits=2), start=1)
        each = [{"trajectory_id": str(i), "explanation": EXPLANATION, "score": score} for i, score in scores]
        return json.dumps({"scores": each}), []
    (score,) = scaled(5, 4, seen)
    return json.dumps({"score": score}) if '{"score"' in text else str(score), []


class FakeJudge:
    """The judge behind a chat endpoint, with what it counted since it was last asked for that."""

    def __init__(self, settings: argparse.Namespace):
        self.settings, self.places = settings, asyncio.Semaphore(PLACES)
        self.forget(0)

    def forget(self, step: int) -> None:
        self.step = step  # so that each step has other faults, and each row the same
        self.counts, self.longest, self.faulty = Counter(requests=0, read=0, written=0, seconds=0.0), 0.0, set()
        self.open: dict[tuple[str, str], list[str]] = {}  # questions whose last answer was a fault, and their texts

    async def chat(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        text = "\n".join(each["content"] for each in messages if TAG.search(each["content"]))
        prefilled = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        tags, question = TAG.findall(text), (text, prefilled)  # a repeat that names the fault asks the same question
        async with self.places:
            luck = random.Random(f"step {self.step} request {self.counts['requests']}")
            self.counts["requests"] += 1
            content, chances = verdict(text, tags, prefilled)
            failed, malformed = luck.random() < self.settings.errors, luck.random() < self.settings.malformed
            malformed &= content != ANALYSIS  # which says nothing that could be wrong
            if malformed:
                content, chances = luck.choice((PROSE, content[: len(content) // 2], "")), []
            if failed or malformed:
                self.faulty.add(question)
                self.open[question] = tags[-1:] if '{"position"' in text else tags
            read = sum(len(TOKEN.findall(each["content"])) for each in messages)
            written = 0 if failed else len(TOKEN.findall(content))
            seconds = self.settings.latency + written * self.settings.token_seconds
            await asyncio.sleep(seconds)
            if failed:
                return web.json_response({"error": {"message": "the judge is away", "code": 500}}, status=500)
            self.counts.update(read=read, written=written, seconds=0 if malformed else seconds)
            if not malformed:
                self.open.pop(question, None)
                self.longest = max(self.longest, seconds)
        each = [{"token": chr(65 + i), "logprob": math.log(chance)} for i, chance in enumerate(chances)]
        logprobs = {"content": [{"token": content, "logprob": 0.0, "top_logprobs": each}]} if each else None
        choice = {"index": 0, "finish_reason": "stop", "logprobs": logprobs}
        choices = [choice | {"message": {"role": "assistant", "content": content}}]
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        head = {"id": "x", "object": "chat.completion", "created": 1, "model": "judge"}
        return web.json_response(head | {"choices": choices, "usage": usage})

    async def counted(self, request: web.Request) -> web.Response:
        for _ in range(PLACES):  # until the requests are done that a crashed step left behind
            await self.places.acquire()
        counted = dict(self.counts) | {"faulty": len(self.faulty), "open": len(self.open)}
        counted["floor"] = max(counted.pop("seconds") / PLACES, self.longest)
        state = {"counted": counted, "unanswered": list(self.open.values())}
        self.forget(int(request.query["next"]))
        for _ in range(PLACES):
            self.places.release()
        return web.json_response(state)


def serve(settings: argparse.Namespace, port: multiprocessing.Queue) -> None:
    judge = FakeJudge(settings)
    loopback.serve([web.post("/v1/chat/completions", judge.chat), web.get("/counted", judge.counted)], port)


def make_groups(queries: int, step: int) -> list[RolloutGroup]:
    """Make the groups of one step. A query comes back in each step, with other rollouts."""
    words, groups = random.Random(step), []
    for q in range(queries):
        prompt = [{"role": "user", "content": f"How do I cook dish {q}?"}]
        query = Query(f"query-{q}", prompt, (Rubric("Says what to do first.", 5), Rubric("Is complete.", 4)))
        texts = [words.choices("heat pan rice cook stir slow well then soft".split(), k=WORDS) for _ in range(G)]
        rollouts = tuple(Rollout(r, " ".join([f"q{q}s{step}r{r}", *text])) for r, text in enumerate(texts))
        groups.append(RolloutGroup(query, rollouts, step=step, epoch=step))
    return groups


# The rows: each takes the judge's address, and a stack for what it closes, and returns what judges one step


def ours(recipe: str, url: str, last: ExitStack) -> Step:
    settings, folder = read_recipe(find_recipe(f"{recipe}.yaml")), last.enter_context(TemporaryDirectory())
    method = load_method(settings["method"], settings.get("method_args", {}), 42)
    judge = Judge(OpenAIClient(url, "judge", concurrency=PLACES))
    scorer = last.enter_context(closing(GroupScorer(method, judge, BufferStore(f"{folder}/live.sqlite"))))
    return lambda groups: [each.rewards for each in scorer.score(groups, groups[0].step).scores]


def one_by_one(groups: list[RolloutGroup], score_all: Callable[[list[str]], Sequence]) -> list[Sequence]:
    """Score each answer alone."""
    ask = "Rate this answer from 0 to 10. Answer with the number alone."
    prompts = [f"{group.query.text}\n\n{each.text}\n\n{ask}" for group in groups for each in group.rollouts]
    rewards = score_all(prompts)
    return [rewards[i : i + G] for i in range(0, len(rewards), G)]


def trl_reward(threads: int, url: str, last: ExitStack) -> Step:
    client = last.enter_context(OpenAI(base_url=url, api_key="none"))
    pool = last.enter_context(ThreadPoolExecutor(threads))

    def score(prompt: str) -> float:  # as the reward functions of tutorials do: the first number, else 0
        messages = [{"role": "user", "content": prompt}]
        reply = client.chat.completions.create(model="judge", messages=messages, temperature=0)
        found = re.search(r"\d+(\.\d+)?", reply.choices[0].message.content or "")
        return float(found[0]) if found else 0.0

    return lambda groups: one_by_one(groups, lambda prompts: list(pool.map(score, prompts)))


def verifiers_judge(url: str, last: ExitStack) -> Step:
    import verifiers.v1 as vf

    judge = vf.Judge(vf.JudgeConfig(base_url=url, model="judge"))
    run = last.enter_context(asyncio.Runner()).run

    async def score_all(prompts: list[str]) -> list[float | None]:
        calls = (judge.complete(prompt, parse=lambda reply: float(reply.text)) for prompt in prompts)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        return [None if isinstance(each, BaseException) else each.parsed for each in replies]

    return lambda groups: one_by_one(groups, lambda prompts: run(score_all(prompts)))


def art_ruler(swallow: bool, url: str, last: ExitStack) -> Step:
    import art
    from art.rewards import ruler_score_group

    run, fields = last.enter_context(asyncio.Runner()).run, {"api_base": url, "api_key": "none"}

    async def score(group: RolloutGroup) -> list[float | None]:
        chats = [[*group.query.prompt, {"role": "assistant", "content": each.text}] for each in group.rollouts]
        told = art.TrajectoryGroup([art.Trajectory(messages_and_choices=chat, reward=0.0) for chat in chats])
        scored = await ruler_score_group(told, "openai/judge", fields, swallow_exceptions=swallow)
        return [each.reward for each in scored.trajectories] if scored else [None] * G

    async def step(groups: list[RolloutGroup]) -> Sequence:
        async with asyncio.TaskGroup() as tasks:  # a crash cancels the others
            scores = [tasks.create_task(score(group)) for group in groups]
        return [each.result() for each in scores]

    return lambda groups: run(step(groups))


def llm_verifier_select(url: str, last: ExitStack) -> Step:
    from llm_verifier import select

    pool, client = (
        last.enter_context(ThreadPoolExecutor(PLACES)),
        last.enter_context(OpenAI(base_url=url, api_key="-")),
    )
    told = dict(criteria=["Says what to do first, and is complete."], n_evaluations=1, model="judge", progress=False)
    score = lambda g: select(g.query.text, [r.text for r in g.rollouts], client=client, **told).scores  # noqa: E731
    return lambda groups: list(pool.map(score, groups))


OURS = "beyond/listwise_two beyond/ruler paper/rankbuffer_bootstrap paper/rrc_scr paper/grpo".split()
ROWS: dict[str, dict[str, Callable[[str, ExitStack], Step]]] = {  # by distribution
    "rankbuffer-trl": {recipe: partial(ours, recipe) for recipe in OURS},
    "trl": {"TRL, one by one": partial(trl_reward, 1), "TRL, 64 threads": partial(trl_reward, PLACES)},
    "verifiers": {"verifiers, v1.Judge": verifiers_judge},
    "openpipe-art": {"ART, RULER": partial(art_ruler, False), "ART, swallowing": partial(art_ruler, True)},
    "llm-verifier": {"llm-verifier, select": llm_verifier_select},
}


def measure(row: Step, url: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Judge all steps, and return what they took and what became of the questions with a fault."""
    total, taus, crashes = Counter(lost=0, in_spite=0), [], []
    for step in range(settings.steps + 1):
        groups, rewards, crash = make_groups(settings.queries, step), [], []
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                rewards = row(groups)
        except Exception as error:  # whatever it is, it would end a training: here it is a result
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            crash = [type(first).__name__]
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        with urllib.request.urlopen(url.removesuffix("/v1") + f"/counted?next={step + 1}") as page:
            state = json.load(page)
        if step == 0:
            continue
        total.update(state["counted"] | spent)
        crashes += crash
        unanswered = {tag for tags in state["unanswered"] for tag in tags}
        for group, given in zip(groups, rewards, strict=not crash):
            tags = [rollout.text.split()[0] for rollout in group.rollouts]
            known = {tag: reward for tag, reward in zip(tags, given, strict=True) if reward is not None}
            total.update(lost=G - len(known), in_spite=len(known.keys() & unanswered))
            taus += [tau_b(list(map(quality, known)), list(known.values()))] if len(known) > 1 else []
    return dict(total) | {"tau": sum(taus) / len(taus) if taus else None, "crashes": crashes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS], help="distributions")
    shape = {"queries": 20, "steps": 4, "latency": 0.3, "token_seconds": 0.02, "malformed": 0.02, "errors": 0.01}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    settings = parser.parse_args()
    os.environ |= {"PRIME_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else litellm fetches prices
    port: multiprocessing.Queue = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(settings, port), daemon=True)
    server.start()
    url, measured = f"http://127.0.0.1:{port.get()}/v1", {}
    counts = {"questions with a fault": "faulty", "never answered": "open"}
    counts |= {"rewarded in spite": "in_spite", "rollouts lost": "lost"}
    costs = "wall s (floor)", "requests", "k tokens in, out", "CPU ms/request", "tau"
    table = Table(Column("row", no_wrap=True), *costs, *counts, "crashed steps")
    for name, make in (each for family in settings.rows for each in ROWS[family].items()):
        with ExitStack() as last:
            got = measured[name] = measure(make(url, last), url, settings)
        cells = [f"{got['wall']:.1f} ({got['floor']:.1f})", f"{got['requests']}"]
        cells += [
            f"{got['read'] / 1000:.0f}, {got['written'] / 1000:.1f}",
            f"{1000 * got['cpu'] / got['requests']:.1f}",
        ]
        tau = "" if got["tau"] is None else f"{got['tau']:.2f}"
        crashed = " ".join([str(len(got["crashes"])), *got["crashes"]])
        table.add_row(name, *cells, tau, *(str(got[key]) for key in counts.values()), crashed)
    server.terminate()
    Console(width=180).print(table)
    versions = {each: version(each) for each in ["openai", *settings.rows]}
    print(json.dumps({"benchmark": "peers", **vars(settings), "rows": measured, "versions": versions}))


if __name__ == "__main__":
    main()
