"""A world of queries, references and rollouts of known quality, and a judge of known error that reads real prompts.

Quality is a number; its unit is the standard deviation of a query's reference responses, whose mean is 0. A response
begins with a word that stands for it, and the judge finds these words under the prompt's own headings: a prompt that
shows the wrong response, or shows it in the wrong place, gets the wrong answer.

The judge has one acuity: `noise` is the standard deviation of the error of one look at one response, and a look is the
response's quality plus error. Each prompt is answered from looks of its own, seeded by the prompt: errors of different
prompts are independent, and the same prompt has the same answer. `lasting` is the share of an error's variance that
belongs to the response instead, so that every prompt repeats it; 0 unless said otherwise. From its looks the judge
answers

* a score: `10 / (1 + exp(-(o + s * look)))` to the next integer. `o` and `s` are its miscalibration for what is asked,
  this query with these rubrics: `o` is normal around 0 with deviation 0.5, `s` log-normal around 0.8 with deviation
  0.3. A single rubric is another thing to ask, with a miscalibration of its own; responses have one quality.
* two scores in comparison: the same for each, and the one that looks better has a point more where they would be
  equal, unless the two look alike.
* the better of two: the one that looks better; where it is allowed, a tie if they look alike, less than 0.02 apart.
* an order: by the looks.
* a position: the number of anchors that look worse than the candidate, one look at each of them all.
* a position among anchors that are not shown: the candidate's score, before it is made an integer, is taken for the
  share of anchors below it, 10 for all.
* a selection: evenly spread over the ladder, with both ends.

Nothing here knows which method asks.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random

from rankbuffer_trl.buffer import select_k0
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric

ALIKE = 0.02
OFFSET, SCALE, SCALE_SPREAD = 0.5, 0.8, 0.3
SENTENCE = 12  # tokens
WORDS = "the a water heat pan rice cook stir slow well then until soft salt add cup boil drain cover minute".split()
_words = Random(0)
SENTENCES = [" ".join(_words.choices(WORDS, k=SENTENCE - 1)) + "." for _ in range(1000)]


@dataclass(frozen=True)
class World:
    """What is judged. The same for every method: no policy is trained here, so no method moves the rollouts.

    Args:
        start (`float`):
            Mean quality of the rollouts of epoch 0, over all queries.
        between (`float`):
            Standard deviation over queries of a query's mean rollout.
        within (`float`):
            Standard deviation of the rollouts of a group around that mean.
        drift (`float`):
            What rollouts gain per epoch.
        empty (`float`):
            Share of rollouts without an answer.
        rubrics (`tuple[float, float, float]`):
            Shares of queries with 3, 4 and 5 rubrics.
        tokens (`tuple[int, int, int, int]`):
            Mean length of query, rubric, reference and rollout; the two last vary log-normally.
        epochs, rollouts, references, queries_per_step, seed (`int`):
            The paper's numbers, and the seed of all that is drawn.
    """

    start: float = 1.2
    between: float = 1.0
    within: float = 0.25
    drift: float = 0.5
    empty: float = 0.02
    rubrics: tuple[float, float, float] = (0.05, 0.35, 0.6)
    tokens: tuple[int, int, int, int] = (190, 24, 240, 400)
    epochs: int = 4
    rollouts: int = 8
    references: int = 7
    queries_per_step: int = 20
    seed: int = 0

    def visits(self, number: int, queries: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        """The groups of one query, one per epoch, and the quality of each response by its first word."""
        random = Random(f"{self.seed}/{number}")
        asked, rubric, reference, rollout = self.tokens
        quality: dict[str, float] = {}

        def response(name: str, value: float, tokens: int) -> str:
            quality[name] = value
            return text(random, name, tokens * random.lognormvariate(-0.045, 0.3))

        (count,) = random.choices((3, 4, 5), self.rubrics)
        rubrics = tuple(Rubric(text(random, "Covers", rubric), random.randint(1, 5)) for _ in range(count))
        values = sorted(random.gauss(0, 1) for _ in range(self.references))
        responses = tuple(response(f"q{number}n{i}", value, reference) for i, value in enumerate(values))
        prompt = [{"role": "user", "content": text(random, f"q{number}", asked)}]
        query = Query(f"q{number}", prompt, rubrics, responses)
        mean = random.gauss(self.start, self.between)
        groups = []
        for epoch in range(self.epochs):
            texts = [
                ""
                if random.random() < self.empty
                else response(f"q{number}e{epoch}r{i}", random.gauss(mean + epoch * self.drift, self.within), rollout)
                for i in range(self.rollouts)
            ]
            step = epoch * math.ceil(queries / self.queries_per_step) + number // self.queries_per_step
            groups.append(RolloutGroup(query, tuple(Rollout(i, t) for i, t in enumerate(texts)), step, epoch))
        return groups, quality


def text(random: Random, first: str, tokens: float) -> str:
    """About `tokens` words and full stops, `first` the first of them."""
    return " ".join([first, *random.choices(SENTENCES, k=max(1, round(tokens / SENTENCE)))])


def first_word(response: str) -> str:
    """What stands for a response."""
    return response.split(" ", 1)[0]


SHOWN = re.compile(r"^(?:\[(\w+)\]|CANDIDATE|RESPONSE)\n(\w+)", re.MULTILINE)


def answer(prompt: str, quality: Mapping[str, float], noise: float, lasting: float = 0.0) -> str:
    """What the judge answers to a prompt, from its text alone. `quality` is by first word."""
    error = Random(blake2b(prompt.encode(), digest_size=8).digest()).gauss
    own, fresh = noise * math.sqrt(lasting), noise * math.sqrt(1 - lasting)
    looks = {
        name: quality[word] + error(0, fresh) + (own and Random(word).gauss(0, own))
        for name, word in SHOWN.findall(prompt)
        if word in quality
    }
    return verdict(prompt, looks)


def verdict(prompt: str, looks: Mapping[str, float]) -> str:
    """The answer to a prompt of a judge to whom its responses look like this; they are named as their headings are."""
    form = prompt.rpartition("Return ")[2]
    if '"position"' in form:
        K = int(re.search(r"through (\d+)>", form)[1])
        anchors = [look for name, look in looks.items() if name]
        if anchors:
            return json.dumps({"position": sum(look < looks[""] for look in anchors)})
        return json.dumps({"position": round(K * score(prompt, looks[""]) / 10)})
    if '"order"' in form:
        return json.dumps({"order": [int(name[1:]) for name in sorted(looks, key=looks.get)]})
    if '"score"' in form:
        return json.dumps({"score": round(score(prompt, looks[""]))})
    alike = "A" in looks and abs(looks["A"] - looks["B"]) < ALIKE
    if '"scores"' in form:
        scores = [round(score(prompt, looks[name])) for name in "AB"]
        if scores[0] == scores[1] and not alike:
            better = looks["A"] < looks["B"]
            scores[better] += 1
            scores = [number - (max(scores) > 10) for number in scores]
        return json.dumps({"scores": scores})
    if '"winner"' in form:
        tie = alike and '"tie"' in form
        return json.dumps({"winner": "tie" if tie else max("AB", key=looks.get)})
    chosen = select_k0([name for name in looks if name[0] != "L"], 4)
    keep, add = ([name for name in chosen if name[0] == letter] for letter in "AR")
    return json.dumps({"keep_anchor_ids": keep, "add_rollout_ids": add})


def score(prompt: str, look: float) -> float:
    """A look on the judge's scale for this query and these rubrics, in 0..10."""
    head, _, rest = prompt.partition("\n\nRUBRICS\n")
    offset, scale = miscalibration(head.partition("\n\nQUERY\n")[2] + rest.partition("\n\n")[0])
    return 10 / (1 + math.exp(-(offset + scale * look)))


@lru_cache(maxsize=1024)
def miscalibration(asked: str) -> tuple[float, float]:
    """Offset and scale."""
    random = Random(asked)
    return random.gauss(0, OFFSET), SCALE * random.lognormvariate(0, SCALE_SPREAD)
