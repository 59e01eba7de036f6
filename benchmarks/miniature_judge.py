"""A judge of known error for responses that a policy has really written.

What a response is worth is what the rubrics of the prompt say (`rankbuffer_trl/judge/rubric_judge.py`), without error.
The judge's looks at it, its acuity, its miscalibration and its way of answering each kind of question are those of
`simulated_judge.py`, where a group's rollouts have the deviation 0.25 around a mean that starts at 1.2, and a look
errs by 0.09. One straight line takes rubric scores to that scale, so that the responses of the policy as it stands
before training have this mean and this deviation. The line, like all else here, is the same for every query, every
method and every seed: nothing here knows which method asks.

Two differences. A rubric that is asked about alone has a worth of its own, where the simulated world gives a response
one quality. And responses of a prompt that are word for word the same look the same in it.
"""

from hashlib import blake2b
from random import Random

from simulated_judge import World, verdict

from rankbuffer_trl.judge import Question, Tally, Usage
from rankbuffer_trl.judge.rubric_judge import count_tokens, read_rubrics, score

NOISE = 0.09  # standard deviation of the error of one look


class NoisyRubricJudge:
    """Answers any question of the package in JSON; implements [`ChatClient`].

    Args:
        mean (`float`):
            Mean rubric score of the policy before training, in 0..1.
        deviation (`float`):
            Standard deviation of its rubric scores within a group, above 0.
        noise (`float`, *optional*, defaults to `0.09`):
            Standard deviation of the error of one look, where `deviation` is 0.25.
    """

    name = "noisy rubric judge"

    def __init__(self, mean: float, deviation: float, noise: float = NOISE):
        self.mean, self.deviation, self.noise = mean, deviation, noise

    async def complete(
        self, messages: list[dict[str, str]], *, question: Question, seed: int, tally: Tally
    ) -> tuple[str, Usage]:
        """See [`ChatClient`]. Words and punctuation marks count as tokens."""
        tally.attempts += 1
        prompt = messages[0]["content"]
        shown = [pair for pairs in question.responses.values() for pair in pairs]
        answer = verdict(prompt, self.looks(prompt, dict(shown)))
        return answer, Usage(count_tokens(prompt), 0, count_tokens(answer))

    def looks(self, prompt: str, shown: dict[str, str]) -> dict[str, float]:
        """How the responses of a prompt look to the judge, by their headings."""
        rubrics = read_rubrics(prompt.partition("\n\nRUBRICS\n")[2].partition("\n\n")[0])
        seed = blake2b(prompt.encode(), digest_size=8).hexdigest()
        return {
            name: self.worth(text, rubrics) + Random(f"{seed} {text}").gauss(0, self.noise)
            for name, text in shown.items()
        }

    def worth(self, text: str, rubrics: list[tuple[int, str]]) -> float:
        """A response's rubric score on the scale of the simulated world."""
        return World.start + World.within * (score(text, rubrics) - self.mean) / self.deviation

    async def close(self) -> None:
        """Nothing to release."""
