"""Invented rows of Nectar's schema, made from the quickstart's queries, and a loopback model that answers them."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from helpers.servers import CHAT, completion


def raw_row(number: int, howto: list[dict]) -> dict:
    """Make a valid row: seven ranked answers, in random order, to a prompt that is unique for this number."""
    row = howto[number % len(howto)]
    prompt = f"\n\nHuman: {row['prompt'][0]['content']} This is question {number}.\n\nAssistant: "
    answers = [
        {"answer": f"{text} ({number})", "model": f"model-{7 - i}", "rank": float(7 - i)}
        for i, text in enumerate(row["responses"])
    ]
    random.Random(number).shuffle(answers)
    further = {"turns": 1, "num_responses": 7, "source": ["made up"], "good_natured": True}
    return {"prompt": prompt, "answers": answers} | further


RUBRICS = [
    {"text": "Says what is needed: a pan, water, a knife.", "weight": 5},
    {"text": "Is written in complete sentences.", "weight": 2},
    {"text": "Does not repeat itself.", "weight": 1},
]


class Model:
    """An OpenAI-compatible model: `answer(messages, how_often)` gives its text, or a whole response.

    `asked` counts requests by their first user message.
    """

    def __init__(self, answer: Callable[[list[dict], int], str | web.Response]):
        self.answer = answer
        self.asked: Counter = Counter()
        self.bodies: list[dict] = []

    def app(self) -> dict[str, Callable]:
        """Return what answers at which path."""

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "writer", "object": "model"}]})

        return {CHAT: self.chat, "/v1/models": models}

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        query = next(message["content"] for message in body["messages"] if message["role"] == "user")
        self.asked[query] += 1
        text = self.answer(body["messages"], self.asked[query])
        if isinstance(text, web.Response):
            return text
        return completion(text, {"prompt_tokens": 100, "completion_tokens": 10})


def rubrics_text(*_) -> str:
    return json.dumps({"rubrics": RUBRICS})


def asked_queries(model: Model) -> Counter:
    """Count how often each query was asked, by the number of its question."""
    return Counter({int(re.search(r"question (\d+)", query).group(1)): count for query, count in model.asked.items()})
