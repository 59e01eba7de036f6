"""A simulated judge of known error that reads real prompts, and a simulated world to judge.

The quality of a response is a number. Its unit is the standard deviation of a query's reference responses, and their
mean is 0. The first word of a response stands for the response. The judge finds these words under the headings of the
prompt. So a prompt that shows the wrong response, or shows it in the wrong place, gets the wrong answer.

The judge looks at each response in a prompt. A look is the quality of the response plus an error, and `noise` is the
standard deviation of the error. The error is seeded by the prompt: different prompts have independent errors, and the
same prompt has the same answer. `lasting` is the share of the error's variance that belongs to the response instead,
so that it repeats in every prompt; the default is 0. From its looks the judge answers

* a score: the integer nearest to `10 / (1 + exp(-(o + s * look)))`. `o` and `s` are the judge's miscalibration for
  this query with these rubrics. `o` is normal around 0 with deviation 0.5. `s` is log-normal around 0.8 with
  deviation 0.3. A question about a single rubric has its own miscalibration, but a response has only one quality.
* two scores in comparison: the same for each response. If they are equal, the one that looks better gets one point
  more, unless the two look alike.
* the better of two: the one that looks better. If a tie is allowed and the looks differ by less than 0.02, a tie.
* an order: the order of the looks.
* a position: the number of anchors that look worse than the candidate, with one look at each of them.
* a position among anchors that are not shown: the candidate's score, before it is rounded, is taken as the share of
  anchors below the candidate (10 for all).
* a selection: evenly spread over the ladder, with both ends.

Nothing in this module knows which method asks.
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
    """The queries, references and rollouts that are judged, the same for every method: no policy is trained.

    Args:
        start (`float`):
            Mean quality of the rollouts of epoch 0, over all queries.
        between (`float`):
            Standard deviation over queries of a query's mean rollout.
        within (`float`):
            Standard deviation of the rollouts of a group around that mean.
        drift (`float`):
            The quality that rollouts gain per epoch.
        empty (`float`):
            Share of rollouts without an answer, in 0..1.
        rubrics (`tuple[float, float, float]`):
            Shares of queries with 3, 4 and 5 rubrics.
        tokens (`tuple[int, int, int, int]`):
            Mean length of a query, a rubric, a reference and a rollout. The last two vary log-normally.
        epochs, rollouts, references, queries_per_step, seed (`int`):
            The paper's numbers, and the seed of the whole world.
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
        """Return the groups of one query, one per epoch, and the quality of each response by its first word."""
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
    """Make a text of about `tokens` words and full stops that begins with `first`."""
    return " ".join([first, *random.choices(SENTENCES, k=max(1, round(tokens / SENTENCE)))])


def first_word(response: str) -> str:
    """Return the word that stands for a response."""
    return response.split(" ", 1)[0]


SHOWN = re.compile(r"^(?:\[(\w+)\]|CANDIDATE|RESPONSE)\n(\w+)", re.MULTILINE)


def answer(prompt: str, quality: Mapping[str, float], noise: float, lasting: float = 0.0) -> str:
    """Answer a prompt from its text. `quality` holds the quality of each response by its first word."""
    error = Random(blake2b(prompt.encode(), digest_size=8).digest()).gauss
    own, fresh = noise * math.sqrt(lasting), noise * math.sqrt(1 - lasting)
    looks = {
        name: quality[word] + error(0, fresh) + (own and Random(word).gauss(0, own))
        for name, word in SHOWN.findall(prompt)
        if word in quality
    }
    return verdict(prompt, looks)


def verdict(prompt: str, looks: Mapping[str, float]) -> str:
    """Answer a prompt from the looks at its responses. `looks` has them by heading."""
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
    """Map a look to the judge's scale for this query and these rubrics, in 0..10."""
    head, _, rest = prompt.partition("\n\nRUBRICS\n")
    offset, scale = miscalibration(head.partition("\n\nQUERY\n")[2] + rest.partition("\n\n")[0])
    return 10 / (1 + math.exp(-(offset + scale * look)))


@lru_cache(maxsize=1024)
def miscalibration(asked: str) -> tuple[float, float]:
    """Draw the offset and the scale of the judge for what is asked."""
    random = Random(asked)
    return random.gauss(0, OFFSET), SCALE * random.lognormvariate(0, SCALE_SPREAD)
