"""Plain measures of answers that need no judge: length, markup, repetition, and words taken over from the rubrics.

A policy that is trained on a judge also learns the judge's taste. A probe shows the taste: its mean over training, and
how far the rewards of a group follow it. Probes only inform.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from ..groups import RolloutGroup, Rubric
from ..rewards._method import GroupScore
from ..stems import content_stems, stem_all

ANY_WORD = re.compile(r"\w+")
MARKUP = re.compile(r"^[ \t]*(?:#{1,6}|[-*+•]|\d{1,9}[.)])[ \t]", re.MULTILINE)
PROBE_NAMES = ("words", "markup", "repeated", "commonest_word", "rubric_words")

Probed = Sequence[tuple[Mapping[str, float], float | None]]
"""The probes of each answered rollout of a group, with its reward, which is `None` if it is unscored."""


def probe(text: str, rubrics: Sequence[Rubric] = ()) -> dict[str, float]:
    """Return the probes of an answer, in time linear in its length.

    `words` is the number of words. `markup` is 1 if a line begins as a Markdown heading or an item of a list, else 0.
    `repeated` is the share of the 4-grams of words that are repeats. `commonest_word` is the share of the words that
    are the commonest one. `rubric_words` is the share of the content words of the rubrics that the answer has.
    """
    # A negative weight names what an answer should not have.
    rubric_stems = {stem for rubric in rubrics if rubric.weight > 0 for stem in content_stems(rubric.text.lower())}
    # Rubrics without English words have no stems, and no such probe.
    used = rubric_stems.intersection(stem_all(text))
    shares = {"rubric_words": len(used) / len(rubric_stems)} if rubric_stems else {}
    words, markup = ANY_WORD.findall(text.lower()), float(MARKUP.search(text) is not None)
    shares |= {"commonest_word": max(Counter(words).values(), default=0) / max(len(words), 1)}
    return {"words": float(len(words)), "markup": markup, "repeated": share_of_repeats(words), **shares}


def share_of_repeats(words: Sequence[str]) -> float:
    grams = set(zip(words, words[1:], words[2:], words[3:], strict=False))
    return 1 - len(grams) / (len(words) - 3) if grams else 0.0  # fewer than four words repeat nothing


def probe_groups(groups: Sequence[RolloutGroup]) -> list[dict[int, dict[str, float]]]:
    """Return the probes of the answered rollouts of each group, by the rollout's id."""
    # No reward is needed, so this runs while the judge works.
    return [{rollout.id: probe(rollout.text, group.query.rubrics) for rollout in group.answered} for group in groups]


def probe_metrics(
    probes: Sequence[Mapping[int, Mapping[str, float]]], scores: Sequence[GroupScore]
) -> dict[str, float]:
    """Return the probes of a step for the trainer's log, by name. See [`probe_groups`] and [`summary`]."""
    probed = [
        [(values, score.rewards[id]) for id, values in of_group.items()]
        for of_group, score in zip(probes, scores, strict=True)
    ]
    return {f"probe/{name}": value for name, value in summary(probed).items()}


def summary(groups: Sequence[Probed]) -> dict[str, float]:
    """Return the mean of each probe over all rollouts, and how far the rewards of a group follow it.

    `<probe>_with_reward` is Kendall's tau-b of probe and reward in a group: 1 if a larger probe always has the higher
    reward.
    """
    means: dict[str, float] = {}
    for name in PROBE_NAMES:
        columns = [[(values[name], reward) for values, reward in group if name in values] for group in groups]
        values = [value for column in columns for value, _ in column]
        # Groups in which one side ties all tell nothing.
        taus = [tau for column in columns if (tau := agreement(column)) is not None]
        means |= {name: fmean(values)} if values else {}
        means |= {f"{name}_with_reward": fmean(taus)} if taus else {}
    return means


def agreement(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the tau-b of the pairs that have a reward, `None` if one side ties all of them."""
    values, rewards = [], []
    for value, reward in pairs:
        if reward is not None:
            values.append(value)
            rewards.append(reward)
    return tau_b(values, rewards) if len(set(values)) > 1 and len(set(rewards)) > 1 else None


def tau_b(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Kendall's tau-b of two scores of the same things; 0 if one of the scores ties all of them."""
    pairs = list(combinations(range(len(x)), 2))
    up = [sign(x[j] - x[i]) for i, j in pairs]
    down = [sign(y[j] - y[i]) for i, j in pairs]
    untied = sum(map(abs, up)) * sum(map(abs, down))
    return sum(a * b for a, b in zip(up, down, strict=True)) / math.sqrt(untied) if untied else 0.0


def sign(x: float) -> int:
    """Return -1, 0 or 1."""
    return (x > 0) - (x < 0)
