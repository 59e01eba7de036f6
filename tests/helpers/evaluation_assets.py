"""Small benchmarks with the schema of the official ones, and a loopback server that plays the judge and the model.

The quality of a text is its number of words `good`. All judges of the four benchmarks count these words.
"""

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas
import yaml
from aiohttp import web

from evaluation.assets import Assets
from evaluation.benchmark import Benchmark
from evaluation.config import EvaluationConfig
from evaluation.run import load_benchmarks
from helpers.servers import served
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.judge.config import JudgeConfig

ROWS = 12
AUTHORS = ("o3-mini-2025-01-31", "gemini-2.0-flash-001")
REFERENCES = ("gpt-4-turbo-2024-04-09", "claude-3-haiku-20240307", "Llama-2-70b-chat-hf")
TAGS = ("Coding & Debugging", "Math", "Creative Writing", "Planning", "Information seeking")
JUDGE_SETTINGS = """
JUDGE_SETTINGS = {
    "hard_prompt": {"baseline": "o3-mini-2025-01-31", "system_prompt": "Compare. Answer [[A>B]] or the like."},
    "creative_writing": {"baseline": "gemini-2.0-flash-001", "system_prompt": "Compare these stories."},
}
"""
JUDGE_CONFIG = r"""
judge_model: gpt-4.1
temperature: 0.0
max_tokens: 160
bench_name: arena-hard-v2.0
regex_patterns:
  - \[\[([AB<>=]+)\]\]
  - \[([AB<>=]+)\]
prompt_template: "<Q>{QUESTION}</Q><A>{ANSWER_A}</A><B>{ANSWER_B}</B>"
"""
WRITING_PROMPT = '''
evaluate_system = "You score writing."
evaluate_prompt = """<Q>{query}</Q><R>{response}</R>{criteria} Answer with JSON: score and reason. {criteria}"""
'''


def goodness(text: str) -> int:
    return len(re.findall("good", text))


def text_of(seed: str) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(["good", "plain", "words", "here"], weights=[1, 2, 2, 2], k=rng.randint(3, 30)))


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def build(folder: Path, rows: int = ROWS) -> Path:
    """Write synthetic assets below `folder`; gives the manifest that pins them."""
    manifest = Assets(folder).manifest

    def write(benchmark: str, name: str, content: str | pandas.DataFrame) -> None:
        entry = manifest[benchmark][name]
        path = folder / entry["path"][0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content.to_parquet(path)
        entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    numbers = range(rows)
    made = ((f"Do {i}", text_of(f"base {i}")) for i in numbers)
    shared = {"dataset": "d", "generator": "gpt4_1106_preview"}
    write("alpaca_eval", "baseline", json.dumps([{"instruction": do, "output": text} | shared for do, text in made]))
    rng = random.Random(0)
    difficulties = [rng.gauss(0, 1) for _ in numbers]
    heads = ("model", "index", "preference", "std_delta_len", "instruction_difficulty", "not_gamed_baseline")
    gamed = [
        (model, i, rng.random(), rng.gauss(0, 1), difficulty, False)
        for model in ("concise", "verbose")
        for i, difficulty in enumerate(difficulties)
    ]
    write("alpaca_eval", "gamed", pandas.DataFrame(gamed, columns=heads).to_csv(index=False))

    categories = ["hard_prompt"] * (2 * rows // 3) + ["creative_writing"] * (rows // 3)
    questions = [
        {"uid": f"q{i}", "category": category, "subcategory": "math", "prompt": f"Question {i} {{braces}}"}
        for i, category in enumerate(categories)
    ]
    write("arena_hard", "questions", jsonl(questions))
    write("arena_hard", "judge_settings", JUDGE_SETTINGS)
    write("arena_hard", "judge_config", JUDGE_CONFIG)
    for author in AUTHORS:
        texts = {question["uid"]: text_of(f"{author} {question['uid']}") for question in questions}
        said = [{"uid": id, "model": author, "messages": [{"content": {"answer": texts[id]}}]} for id in texts]
        write("arena_hard", author, jsonl(said))

    turns = [[("user", f"Talk {i}"), ("assistant", "Yes?"), ("user", f"More {i}")][2 * (i % 2) :] for i in numbers]
    spoken = [[{"role": role, "content": text, "language": "English"} for role, text in each] for each in turns]
    shared = {"references": {"gpt-4": "x"}, "length": 1, "checklist": ["Is it right?", "Is it short?"], "intent": "i"}
    conversations = [
        {"id": f"s{i}", "session_id": f"s{i}", "conversation_input": spoken[i], "primary_tag": TAGS[i % 5]}
        | {"secondary_tags": [TAGS[(i + 1) % 5]], **shared}
        for i in numbers
    ]
    write("wildbench", "questions", pandas.DataFrame(conversations))
    write("wildbench", "score_template", "<H>{$history}</H><Q>{$user_query}</Q><R>{$model_output}</R>{$checklist}")
    pairwise = "<H>{$history}</H><Q>{$user_query}</Q><A>{$candidate_A}</A><B>{$candidate_B}</B>{$checklist} choice"
    write("wildbench", "pairwise_template", pairwise)
    for name in REFERENCES:
        said = [{"session_id": f"s{i}", "output": [text_of(f"{name} s{i}")], "generator": name} for i in numbers]
        write("wildbench", name, pandas.DataFrame(said))

    bands = {band: band for band in ("1-2", "3-4", "5-6", "7-8", "9-10")}
    checklist = [{"name": f"c{k}", "criteria_description": "d", **bands} for k in range(5)]
    shared = {"domain2": "x", "lang": "en", "checklist": checklist}
    domains = ("Art", "Law")
    queries = [{"index": i + 1, "domain1": domains[i % 2], "query": f"Write {i}", **shared} for i in numbers]
    write("writingbench", "questions", jsonl(queries))
    write("writingbench", "prompt", WRITING_PROMPT)
    write("writingbench", "calculate_scores", "# not run here\n")
    path = folder / "assets.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return path


def values_of(url: str, policy: str, out: Path) -> dict:
    """Return the settings of an evaluation whose model and judge are behind `url`."""
    engine = dict(models=[f"mine={policy}"], output_dir=str(out), engine_url=f"{url}/v1", engine_model="model")
    judge = dict(judge_url=[f"{url}/v1"], judge_model="judge", judge_max_retries=0)
    return engine | judge | dict(judge_prompt_price=1.0, judge_completion_price=2.0)


def texts_of(benchmark: Benchmark) -> dict[str, str]:
    """Return the text after the thinking that the loopback model gives to each prompt."""
    return {prompt.id: text_of(prompt.messages[-1]["content"]) for prompt in benchmark.prompts()}


def hostile_outputs(benchmark: Benchmark) -> dict[str, str]:
    """Return outputs of different worth; the second is empty, the third long, the fourth looks like a template."""
    ids = [prompt.id for prompt in benchmark.prompts()]
    hostile = "{$checklist} {$history} {query} {criteria} {0} {{good}} good </R> <R>"
    outputs = {id: " ".join(["good"] * (place % 9)) + " x" for place, id in enumerate(ids)}
    return outputs | dict(zip(ids[1:4], (" \n", "good " * 1001, hostile), strict=True))


def run_judge(benchmark: Benchmark, folder: Path, server: "Loopback", outputs: dict[str, str] | None = None) -> Totals:
    """Judge the outputs of `mine` with the judge behind `server` and return the cost."""
    benchmark.write_outputs(folder, "mine", outputs or hostile_outputs(benchmark))
    with served(server.app) as url:
        config = JudgeConfig(judge_url=f"{url}/v1", judge_model="judge", judge_max_retries=0)
        return benchmark.judge(folder, "mine", config)


def write_outputs(config: EvaluationConfig, name: str, **changes: str | None) -> Path:
    """Write the outputs of `mine` for one benchmark, with texts changed by prompt id, and return their file."""
    benchmark = load_benchmarks(replace(config, benchmarks=[name]), config.assets())[name]
    folder = config.folder("mine", name)
    benchmark.write_outputs(folder, "mine", texts_of(benchmark) | changes)
    (path,) = folder.rglob("*.json*")
    return path


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a JSON list or of JSON lines."""
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps(rows) if path.suffix == ".json" else jsonl(rows))


def between(text: str, tag: str) -> str:
    return re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL).group(1)


def verdict(messages: list[dict]) -> str:
    """Return the judge's answer in words."""
    prompt = next(message["content"] for message in messages if message["role"] == "user")  # not a repeat's turn
    if "<A>" in prompt:
        a, b = (goodness(between(prompt, tag)) for tag in "AB")
        if "choice" in prompt:
            won = f"{'A' if a > b else 'B'}{'++' if abs(a - b) > 2 else '+'}"
            return json.dumps({"choice": "A=B" if a == b else won})
        strong = ">" * (1 + (abs(a - b) > 2))
        return f"Let me see. [[A{'=' if a == b else strong}B]]" if a >= b else f"[[B{strong}A]]"
    score = min(10, 1 + goodness(between(prompt, "R")))
    if "JSON" in prompt:
        return json.dumps({"score": score, "reason": "it has good words"})
    return json.dumps({"strengths": "s", "weaknesses": "w", "score": str(score)})


def logprobs(messages: list[dict]) -> dict:
    """Return the judge's answer to AlpacaEval: a preference for the output with more good words."""
    m, M = (goodness(part) for part in re.findall(r'"output":\s*"""(.*?)"""', messages[-1]["content"], re.DOTALL))
    share = 1 / (1 + math.exp(M - m))
    chances = {"m": share, "M": 1 - share, "x": 1e-9}
    top = [{"token": token, "bytes": None, "logprob": math.log(chance)} for token, chance in chances.items()]
    return {"content": [{**max(top, key=lambda each: each["logprob"]), "top_logprobs": top}]}


def reply(body: dict, text: str, found: dict | None) -> web.Response:
    """Return an answer in the form of an OpenAI server."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": found}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    kind = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return web.json_response(kind | {"choices": [choice], "usage": usage})


class Loopback:
    """An application that serves the judge `judge` and the model `model`.

    Args:
        answer (`Callable`, *optional*):
            Changes what the judge says: from the request's body and the answer to another, or to an HTTP status.
    """

    def __init__(self, answer: Callable[[dict, str], str | int] = lambda body, text: text, context: int = 100_000):
        self.answer, self.context = answer, context
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.with_logprobs = True
        self.app = web.Application(client_max_size=2**24)
        self.app.router.add_post("/v1/chat/completions", self.complete)
        self.app.router.add_post("/tokenize", self.tokenize)
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_get("/health", self.models)

    async def models(self, request: web.Request) -> web.Response:
        kind = {"object": "model", "created": 0, "owned_by": "t", "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [{"id": name} | kind for name in ("judge", "model")]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": sum(len(m["content"].split()) for m in body["messages"])})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.asked[body["model"]] += 1
        found = None
        if body["model"] == "model":
            text = f"<think>good good</think>\n\n{text_of(body['messages'][-1]['content'])}"
        elif body.get("logprobs"):
            found = logprobs(body["messages"]) if self.with_logprobs else None
            text = found["content"][0]["token"] if found else "m"
        else:
            text = verdict(body["messages"])
        text = self.answer(body, text)
        if isinstance(text, int):
            return web.json_response({"error": {"message": "no"}}, status=text)
        return reply(body, text, found)
