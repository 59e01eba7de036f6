"""A judge that makes errors of a known size, for responses that a policy has written.

The true worth of a response is the score that the rubrics of the prompt give it
(`rankbuffer_trl/judge/_rubric_judge.py`), without error. The judge sees this worth with the errors of
`simulated_judge.py`, and answers each kind of question in the same way. There, the rollouts of a group have a
deviation of 0.25 around a mean that starts at 1.2, and the error of one judgment is 0.09. A linear function maps
rubric scores to that scale, so that the policy's responses before training have this mean and this deviation. The
function is the same for every query, method and seed. The judge does not know which method asks.

Two things differ from the simulated judge. If a question is about one rubric only, a response has a worth for this
rubric; there, a response has one quality. Responses of one prompt with the same words look the same to the judge.

A judge may have a weakness: it likes a trait of responses that is worth nothing, or the place where they stand.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from experiments.simulated_judge import Doubts, JudgeErrors, World, verdict
from rankbuffer_trl.judge import (
    Question,
    Reply,
    Tally,
    Usage,
    count_tokens,
    parse_rubrics,
    rubric_score,
    without_doubt,
)
from rankbuffer_trl.stems import WORD, content_stems, stem_all

NOISE = 0.09  # standard deviation of the error of one judgment
REFERENCE_NOISE = 0.18  # of a reference judge that is half as exact as the judge
Rubrics = Sequence[tuple[int, str]]


def echo(text: str, rubrics: Rubrics) -> float:
    """Count the words of a response that are a rubric's, repeated ones too."""
    named = {stem for _, rubric in rubrics for stem in content_stems(rubric.lower())}
    return sum(stem in named for stem in stem_all(text))


TRAITS: dict[str, Callable[[str, Rubrics], float]] = {
    "length": lambda text, rubrics: len(WORD.findall(text.lower())),
    "phrase": lambda text, rubrics: float(re.search(r"\bthen\b", text.lower()) is not None),
    "echo": echo,
}
PLACE = "place"


@dataclass(frozen=True)
class Weakness:
    """What a judge likes without reason.

    Args:
        name (`str`):
            A key of `TRAITS`, or `place` for the response that stands first.
        strength (`float`):
            What one standard deviation of the trait, or the first place over the last one, is worth to the judge. The
            unit is the deviation of true quality within a group, before training.
        mean, deviation (`float`, *optional*):
            The trait of the policy's responses before training.
    """

    name: str
    strength: float
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, name: str, strength: float, trait: tuple[float, float]) -> "Weakness | None":
        """Return a weakness with mean and deviation of its trait, `None` if it has no name."""
        return cls(name, strength, *trait) if name else None

    def worth(self, text: str, rubrics: Rubrics) -> float:
        """Return what the trait of a response adds to its perceived quality."""
        if self.name == PLACE:
            return 0.0
        return World.within * self.strength * (TRAITS[self.name](text, rubrics) - self.mean) / self.deviation


class NoisyRubricJudge:
    """A client that answers every question of the package in JSON; it implements [`ChatClient`].

    Args:
        mean (`float`):
            Mean rubric score of the policy before training, in 0..1.
        deviation (`float`):
            Standard deviation of its rubric scores within a group, above 0.
        noise (`float`, *optional*, defaults to `0.09`):
            Standard deviation of the error of one judgment, on the scale on which `deviation` is 0.25.
        doubts (`Doubts`, *optional*):
            Answer with doubts, and with their errors in place of `noise`.
        weakness (`Weakness`, *optional*):
            What the judge likes without reason.
    """

    name = "noisy rubric judge"

    def __init__(
        self,
        mean: float,
        deviation: float,
        noise: float = NOISE,
        doubts: Doubts | None = None,
        weakness: Weakness | None = None,
    ):
        self.mean, self.deviation, self.doubts, self.weakness = mean, deviation, doubts, weakness
        first = World.within * weakness.strength if weakness and weakness.name == PLACE else 0.0
        self.errors = JudgeErrors(noise, bias=first)

    async def complete(self, messages: list[dict[str, str]], *, question: Question, seed: int, tally: Tally) -> Reply:
        """Answer as [`ChatClient`] says. Each word and each punctuation mark counts as one token."""
        tally.attempts += 1
        prompt = messages[0]["content"]
        shown = [pair for pairs in question.responses.values() for pair in pairs]
        perceived = self.perceived(prompt, dict(shown))
        if self.doubts:
            answer, logprobs = self.doubts.reply(prompt, perceived)
        else:
            answer = verdict(prompt, perceived)
            logprobs = without_doubt(answer)
        return Reply(answer, Usage(count_tokens(prompt), 0, count_tokens(answer)), logprobs=logprobs)

    def perceived(self, prompt: str, shown: dict[str, str]) -> dict[str, float]:
        """Return the quality that the judge perceives in each response of a prompt, by its heading."""
        rubrics = parse_rubrics(prompt.partition("\n\nRUBRICS\n")[2].partition("\n\n")[0])
        seed = blake2b(prompt.encode(), digest_size=8).hexdigest()
        errors = self.doubts.errors(prompt) if self.doubts else self.errors
        own, fresh = errors.noise * math.sqrt(errors.lasting), errors.noise * math.sqrt(1 - errors.lasting)
        favour = errors.favour(prompt, list(shown))
        return {
            name: self.worth(text, rubrics)
            + Random(f"{seed} {text}").gauss(0, fresh)
            + (own and Random(text).gauss(0, own))
            + favour[name]
            for name, text in shown.items()
        }

    def worth(self, text: str, rubrics: list[tuple[int, str]]) -> float:
        """Return the rubric score of a response on the scale of the simulated judge, with what a weakness adds."""
        liked = self.weakness.worth(text, rubrics) if self.weakness else 0.0
        return World.start + World.within * (rubric_score(text, rubrics) - self.mean) / self.deviation + liked

    def believed(self, text: str, rubrics: Rubrics) -> float:
        """Return the rubric score in 0..1, or beyond by a weakness, in which this judge believes without noise."""
        return self.mean + self.deviation * (self.worth(text, rubrics) - World.start) / World.within

    async def close(self) -> None:
        """Nothing to release."""


class Again(NoisyRubricJudge):
    """A judge whose errors are not those of the run's judge."""

    def perceived(self, prompt: str, shown: dict[str, str]) -> dict[str, float]:
        """Look at the same prompt with other errors."""
        return super().perceived(prompt + "\n", shown)


class ReferenceRubricJudge(Again):
    """A judge without a weakness, whose errors are twice those of the run's judge.

    Args:
        mean, deviation (`float`):
            As in [`NoisyRubricJudge`].
    """

    name = "reader"

    def __init__(self, mean: float, deviation: float):
        super().__init__(mean, deviation, REFERENCE_NOISE)
