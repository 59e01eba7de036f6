# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
"""One step of RankBuffer, printed: eight answers to one question are ranked against one buffer of anchors.

    python examples/one_group.py        # or: uv run examples/one_group.py

The judge is the embedded one, which scores answers by their words. So this needs no GPU, no server and no library. A
training run does the same for every group, with a language model as judge and the policy's own answers.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # so it runs in a clone where nothing is installed

from rankbuffer_trl.buffer import AnchorBuffer, initial_buffer
from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import Judge, RubricJudge
from rankbuffer_trl.ranking import Ranking, coarse_to_fine, rank_rewards

H = 2  # an inner anchor with no answer next to it leaves the buffer after so many epochs (the paper: 3)
QUERY = Query(
    id="tea",
    prompt=[{"role": "user", "content": "How do I make a cup of tea?"}],
    rubrics=(
        Rubric("Gives the steps in order: boil, pour, steep, remove, milk.", 5),
        Rubric("Says how long the tea steeps: three minutes or four minutes.", 4),
        Rubric("Is written in complete sentences.", 2),
        Rubric("Leaves out filler: whatever, stuff, somehow.", 1),
    ),
    responses=(  # reference responses of the data set, from worst to best: the first anchors
        "put a tea bag in hot water or whatever",
        "pour hot water on a tea bag",
        "Boil water and pour it on the tea. Let it steep. Remove the bag.",
        "Boil water and pour it on the tea. Let it steep four minutes. Remove the bag.",
    ),
)
ANSWERS = (  # what a policy might sample for the query; the empty one was cut off while it was thinking
    "somehow with water and stuff",
    "Boil water and pour it on the tea. Let it steep.",
    "boil water and pour it on a tea bag",
    "",
    "Boil water, pour it on the tea, steep four minutes, remove it, add milk.",
    "boil water, pour it on the tea, let it steep",
    "Pour water on the tea. Let it steep for three minutes.",
    "put tea in a cup and pour some stuff over it",
)
BETTER = (ANSWERS[4], ANSWERS[6], QUERY.responses[3], ANSWERS[4])  # what it might sample once it has learned
WHY = {
    "left": "the worst answer below all anchors",
    "right": "the best answer above all anchors",
    "refine": "the lower median of an interval with three or more answers",
}


def name_position(p: int, K: int) -> str:
    """Name the insertion position `p` among `K` anchors."""
    return "below A0" if p == 0 else f"above A{K - 1}" if p == K else f"between A{p - 1} and A{p}"


def show_buffer(title: str, buffer: AnchorBuffer) -> None:
    print(f"\n{title} (worst to best)")
    for k, anchor in enumerate(buffer.anchors):
        print(f"  A{k}  {anchor.id:<10} {anchor.text}")


def show_ranking(ranking: Ranking, rewards: tuple[float | None, ...], K: int) -> None:
    print("\n1. Coarse ranking: each answer gets one question, where does it belong among the anchors?")
    for i, text in enumerate(ANSWERS):
        where = name_position(ranking.positions[i], K) if text else "no answer"
        print(f"  R{i}  {where:<17}  {text}".rstrip())
    print("\n2. Fine ranking: each interval with two answers or more gets one question.")
    for p, rollouts in enumerate(ranking.sigma):
        if len(rollouts) >= 2:
            print(f"  {name_position(p, K)}: {' < '.join(f'R{rollout.id}' for rollout in rollouts)}")
    print(f"\n3. Rewards: r = -1 + 2 q / {len(ANSWERS) - 1}, where q is the number of answers below.")
    for q, i in enumerate(sorted(range(len(ANSWERS)), key=lambda i: rewards[i])):
        print(f"  q = {q}  R{i}  {rewards[i]:+.3f}")


def changes(before: AnchorBuffer, after: AnchorBuffer) -> list[str]:
    """Say which anchors came and went, and why."""
    came = [f"+ {new.id}: {WHY[new.source]}" for new in after.anchors if new.id not in {a.id for a in before.anchors}]
    kept = {anchor.id for anchor in after.anchors}
    return came + [f"- {a.id}: no answer next to it in {H} epochs" for a in before.anchors if a.id not in kept]


async def main() -> None:
    judge = Judge(RubricJudge())
    buffer = initial_buffer(QUERY.responses, k0=4)
    print(f"QUERY  {QUERY.text}")
    show_buffer("BUFFER before the first visit", buffer)

    rollouts = [Rollout(i, text) for i, text in enumerate(ANSWERS) if text]
    empty = [i for i, text in enumerate(ANSWERS) if not text]  # never judged, and below all others
    ranking = await coarse_to_fine(QUERY, buffer, rollouts, judge)
    show_ranking(ranking, rank_rewards(ranking.order, len(ANSWERS), empty), len(buffer))
    updated = buffer.update(ranking.sigma, epoch=0, step=0, H=H)
    print("\n4. Buffer update. A new anchor is called <step>-<rollout>.", *changes(buffer, updated), sep="\n  ")
    show_buffer(f"BUFFER after {len(judge.calls)} questions", updated)

    print(f"\nLATER VISITS: the policy has learned and samples {len(BETTER)} better answers")
    for epoch in range(1, 4):
        buffer = updated
        ranking = await coarse_to_fine(QUERY, buffer, [Rollout(i, text) for i, text in enumerate(BETTER)], judge)
        updated = buffer.update(ranking.sigma, epoch, step=50 * epoch, H=H)
        positions = ", ".join(str(p) for p in ranking.positions.values())
        print(f"  epoch {epoch}: positions {positions} of 0..{len(buffer)}", *changes(buffer, updated), sep="\n    ")
    show_buffer("BUFFER after the last visit", updated)


if __name__ == "__main__":
    asyncio.run(main())
