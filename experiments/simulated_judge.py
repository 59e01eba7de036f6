"""A simulated judge of known error that reads real prompts, and a simulated world to judge.

The quality of a response is a number. Its unit is the standard deviation of a query's reference responses, and their
mean is 0. The first word of a response stands for the response. The judge finds these words under the headings of the
prompt. So a prompt that shows the wrong response, or shows it in the wrong place, gets the wrong answer.

The judge sees the quality of each response in a prompt with an error: its perceived quality. [`JudgeErrors`] has
the settings. By default the error is normal, and it is drawn afresh for every prompt and response. It is seeded by the
prompt, so the same prompt has the same answer. The other errors are off by default:

* `lasting`: a share of the error's variance belongs to the response and repeats in every prompt.
* `crowd`: the error grows with the number of responses in the prompt, anchors included.
* `bias`: the judge favours the responses that stand first, or those at both ends.
* `labels`: the judge favours low labels, wherever they stand.

From the perceived qualities the judge answers

* a score: the integer nearest to `10 / (1 + exp(-(o + s * perceived)))`. `o` and `s` are the judge's miscalibration
  for this query with these rubrics. `o` is normal around 0 with deviation 0.5. `s` is log-normal around 0.8 with
  deviation 0.3. A question about a single rubric has its own miscalibration, but a response has only one quality.
* two scores in comparison: the same for each response. If they are equal, the one perceived as better gets one point
  more, unless both are perceived as equal.
* the better of two: the one perceived as better. If a tie is allowed and the two differ by less than 0.02, a tie. An
  empty response is worse than any other.
* an order: the order of the perceived qualities.
* a position: the number of anchors perceived as worse than the candidate, each with an error of its own.
* a position among anchors that are not shown: the candidate's score, before it is rounded, is taken as the share of
  anchors below the candidate (10 for all).
* a selection: evenly spread over the ladder, with both ends.

A judge with [`Doubts`] gives probabilities, and its word is the likeliest answer. Nothing in this module knows which
method asks.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any

from rankbuffer_trl.buffer import select_k0
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import without_doubt

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
        spread (`float`):
            Standard deviation of the logarithm of `within` over queries. With 0, all groups have the same deviation.
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
    spread: float = 0.0
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
        within = self.within * Random(f"{self.seed}/{number}/spread").lognormvariate(0, self.spread)
        groups = []
        for epoch in range(self.epochs):
            texts = [
                ""
                if random.random() < self.empty
                else response(f"q{number}e{epoch}r{i}", random.gauss(mean + epoch * self.drift, within), rollout)
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
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 0.5 - share,
    "edges": lambda share: abs(2 * share - 1) - 0.5,
}


@dataclass(frozen=True)
class JudgeErrors:
    """The errors of the judge's perceived qualities. All sizes have the unit of quality.

    Args:
        noise (`float`, *optional*, defaults to `0.09`):
            Standard deviation of the error of one perceived quality, in a prompt with one or two responses.
        lasting (`float`, *optional*, defaults to `0.0`):
            Share of the error's variance that belongs to the response and repeats in every prompt, in 0..1.
        crowd (`float`, *optional*, defaults to `1.0`):
            How many times as large the error is in a prompt with 8 responses as in a prompt with 2. The error grows as
            a power of the number of responses `n`: the factor is `crowd ** log4(n / 2)`. Anchors count as responses,
            and a single response counts as two. The lasting part grows as well.
        bias (`float`, *optional*, defaults to `0.0`):
            Difference that the place alone makes between the most and the least favoured place. It is the same
            for any number of responses from 2 on.
        shape (`str`, *optional*, defaults to `"linear"`):
            `linear`: the first place is the most favoured one, and the favour falls evenly towards the last place.
            `edges`: both ends are the most favoured places, and the middle is the least favoured one.
        drawn (`bool`, *optional*, defaults to `False`):
            Draw the sign of the bias for each query: half of the queries favour the other places.
        labels (`float`, *optional*, defaults to `0.0`):
            Difference that the label alone makes between the lowest and the highest label of a prompt. A response
            without a label gets half of it.
    """

    noise: float = 0.09
    lasting: float = 0.0
    crowd: float = 1.0
    bias: float = 0.0
    shape: str = "linear"
    drawn: bool = False
    labels: float = 0.0

    def settled(self, within: float) -> "JudgeErrors":
        """Return the same judge as seen from its mean preference: what it would say on average over presentations.

        Mean preference is quality plus lasting error. It takes the place of quality: its standard deviation within a
        group counts as `within`, and no error lasts. Verdicts on pairs of rollouts have the same distribution.

        Args:
            within (`float`):
                Standard deviation of the quality of the rollouts of a group.
        """
        scale = within / math.hypot(within, self.noise * math.sqrt(self.lasting))
        noise = scale * self.noise * math.sqrt(1 - self.lasting)
        return replace(self, noise=noise, lasting=0.0, bias=scale * self.bias, labels=scale * self.labels)

    def deviation(self, n: int) -> float:
        """Return the standard deviation of a perceived quality in a prompt with `n` responses."""
        return self.noise * self.crowd ** math.log(max(n, 2) / 2, 4)

    def favour(self, prompt: str, names: Sequence[str]) -> dict[str, float]:
        """Return what place and label add to each response of a prompt, by its heading, in the order of places."""
        places = shares(names)
        direction = Random(f"direction {query_of(prompt)}").choice((-1, 1)) if self.drawn else 1
        labels = shares(sorted(filter(None, names), key=lambda name: (name[0], int(name[1:] or 0))))
        return {
            name: (direction * self.bias * SHAPES[self.shape](places[name]) if len(places) > 1 else 0.0)
            + self.labels * (0.5 - labels.get(name, 0.5))
            for name in names
        }


WORLDS = {
    "careful": JudgeErrors(noise=0.19, lasting=0.8, bias=0.02),
    "biased": JudgeErrors(noise=0.25, lasting=0.55, bias=0.22),
    "blunt": JudgeErrors(noise=0.3, lasting=0.45, bias=0.08),
}
"""Three judges whose errors lie in the ranges that public records of pairwise verdicts allow.

The records give errors as multiples of the spread of true quality over responses. Here that spread is 0.25, the
deviation within a group of [`World`]. So rollouts are taken to differ as much as the responses of the records, which
are of different models. `lasting` is an upper bound, because errors of the labels count as lasting. No record says how
much a judge errs in a list of eight, so `crowd` is left open. experiments/judge_cost/README.md has sources and ranges.
"""


@dataclass(frozen=True)
class Doubts:
    """A judge whose word ties where its probabilities do not. Each kind of question has its own errors.

    Args:
        pair, insertion, rating, lists (`JudgeErrors`):
            The errors in prompts that ask for the better of two, a position, a score, or anything else.
        odds (`float`):
            Log odds in a pair for each unit of quality. The position bias in log odds is the pair's `bias` times this.
        step, habit (`float`):
            Log odds of a position over the next lower one, for each unit of quality of the candidate over the anchor
            between them; and those that every candidate has.
        points, centre, width (`float`):
            Scores are a discretised normal distribution. Its centre is `centre` for the quality 0, and `points` more
            for each unit of quality. `width` is its standard deviation.
    """

    pair: JudgeErrors
    insertion: JudgeErrors
    rating: JudgeErrors
    lists: JudgeErrors
    odds: float
    step: float
    habit: float
    points: float
    centre: float
    width: float

    def errors(self, prompt: str) -> JudgeErrors:
        """Return the errors for the responses of a prompt."""
        kinds = {'"winner"': self.pair, '"position"': self.insertion, '"score"': self.rating}
        form = form_of(prompt)
        return next((errors for key, errors in kinds.items() if key in form), self.lists)

    def reply(self, prompt: str, perceived: Mapping[str, float]) -> tuple[str, Any]:
        """Answer a prompt from perceived qualities, with log probabilities. A list has no doubts."""
        form = form_of(prompt)
        if '"winner"' in form:
            return spell("winner", {"A": self.odds * (perceived["A"] - perceived["B"]), "B": 0.0})
        if '"position"' in form and len(perceived) > 1:
            steps = [self.step * (perceived[""] - value) + self.habit for name, value in perceived.items() if name]
            return spell("position", {p: sum(steps[:p]) for p in range(len(steps) + 1)})
        if '"score"' in form:
            most, centre = int(re.search(r"through (\d+)>", form)[1]), self.centre + self.points * perceived[""]
            return spell("score", {s: -(((s - centre) / self.width) ** 2) / 2 for s in range(most + 1)})
        text = verdict(prompt, perceived)
        return text, without_doubt(text)


def spell(key: str, weights: Mapping[Any, float]) -> tuple[str, Any]:
    """Return the answer of a greedy judge with these log odds, and its log probabilities. A character is a token."""
    most = max(weights.values())
    answers = {json.dumps({key: value}): math.exp(weight - most) for value, weight in weights.items()}
    said, places = "", []
    while said not in answers:
        following: Counter[str] = Counter()
        for text, chance in answers.items():
            if text.startswith(said):
                following[text[len(said)]] += chance
        total = math.log(following.total())
        listed = [{"token": t, "logprob": math.log(c) - total} for t, c in following.most_common(20) if c > 0]
        places.append(listed[0] | {"top_logprobs": listed})
        said += listed[0]["token"]
    return said, {"content": places}


RECORDED = Doubts(
    pair=JudgeErrors(0.34, bias=1.2),
    insertion=JudgeErrors(0.77),
    rating=JudgeErrors(0.21),
    lists=JudgeErrors(8.0, bias=-7.9),
    odds=0.18,
    step=0.12,
    habit=0.01,
    points=4.5,
    centre=7.6,
    width=4.5,
)
"""A judge that `fit_doubts.py` fitted to 2,012 verdicts of Qwen2.5-Coder-1.5B over llama.cpp, on 59 queries.

Its position bias in pairs is 0.23 in log odds, and a unit of quality is worth 0.18. It repeats the order of a list.
"""


def shares(names: Sequence[str]) -> dict[str, float]:
    """Return the place of each name as a share of the way from the first to the last one; 0.5 if there is only one."""
    last = len(names) - 1
    return {name: place / last if last else 0.5 for place, name in enumerate(names)}


def answer(prompt: str, quality: Mapping[str, float], errors: JudgeErrors) -> str:
    """Answer a prompt from its text. `quality` holds the quality of each response by its first word."""
    return verdict(prompt, perceived_qualities(prompt, quality, errors))


def reply(prompt: str, quality: Mapping[str, float], judge: JudgeErrors | Doubts) -> tuple[str, Any]:
    """Answer a prompt as [`answer`] does, with log probabilities."""
    if isinstance(judge, Doubts):
        return judge.reply(prompt, perceived_qualities(prompt, quality, judge.errors(prompt)))
    text = answer(prompt, quality, judge)
    return text, without_doubt(text)


def perceived_qualities(prompt: str, quality: Mapping[str, float], errors: JudgeErrors) -> dict[str, float]:
    """Return the perceived quality of each response of a prompt, by heading."""
    shown = {name: word for name, word in SHOWN.findall(prompt) if word in quality}
    random = Random(blake2b(prompt.encode(), digest_size=8).digest())
    deviation = errors.deviation(len(shown))
    own, fresh = deviation * math.sqrt(errors.lasting), deviation * math.sqrt(1 - errors.lasting)
    favour = errors.favour(prompt, list(shown))
    return {
        name: quality[word] + random.gauss(0, fresh) + (own and Random(word).gauss(0, own)) + favour[name]
        for name, word in shown.items()
    }


def verdict(prompt: str, perceived: Mapping[str, float]) -> str:
    """Answer a prompt from the perceived qualities of its responses, by heading."""
    form = form_of(prompt)
    if '"position"' in form:
        K = int(re.search(r"through (\d+)>", form)[1])
        anchors = [value for name, value in perceived.items() if name]
        if anchors:
            return json.dumps({"position": sum(value < perceived[""] for value in anchors)})
        return json.dumps({"position": round(K * score(prompt, perceived[""]) / 10)})
    if '"order"' in form:
        return json.dumps({"order": [int(name[1:]) for name in sorted(perceived, key=perceived.get)]})
    if '"score"' in form:
        return json.dumps({"score": round(score(prompt, perceived[""]))})
    alike = {"A", "B"} <= perceived.keys() and abs(perceived["A"] - perceived["B"]) < ALIKE
    if "integers from 0 through 100" in form:
        return json.dumps({"scores": [round(10 * score(prompt, value)) for value in perceived.values()]})
    if '"scores"' in form:
        scores = [round(score(prompt, perceived[name])) for name in "AB"]
        if scores[0] == scores[1] and not alike:
            better = perceived["A"] < perceived["B"]
            scores[better] += 1
            scores = [number - (max(scores) > 10) for number in scores]
        return json.dumps({"scores": scores})
    if '"winner"' in form:
        tie = alike and '"tie"' in form
        worst = -math.inf  # of an empty response
        return json.dumps({"winner": "tie" if tie else max("AB", key=lambda name: perceived.get(name, worst))})
    chosen = select_k0([name for name in perceived if name[0] != "L"], 4)
    keep, add = ([name for name in chosen if name[0] == letter] for letter in "AR")
    return json.dumps({"keep_anchor_ids": keep, "add_rollout_ids": add})


def score(prompt: str, perceived: float) -> float:
    """Map a perceived quality to the judge's scale for this query and these rubrics, in 0..10."""
    head, _, rest = prompt.partition("\n\nRUBRICS\n")
    offset, scale = miscalibration(head.partition("\n\nQUERY\n")[2] + rest.partition("\n\n")[0])
    return 10 / (1 + math.exp(-(offset + scale * perceived)))


def form_of(prompt: str) -> str:
    """Return what a prompt says about the form of its answer."""
    return prompt.rpartition("Return ")[2]


def query_of(prompt: str) -> str:
    """Return the text of a prompt's query."""
    return prompt.partition("\n\nQUERY\n")[2].partition("\n\nRUBRICS\n")[0]


@lru_cache(maxsize=1024)
def miscalibration(asked: str) -> tuple[float, float]:
    """Draw the offset and the scale of the judge for what is asked."""
    random = Random(asked)
    return random.gauss(0, OFFSET), SCALE * random.lognormvariate(0, SCALE_SPREAD)
