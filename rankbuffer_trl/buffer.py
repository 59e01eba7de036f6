"""The ordered anchor buffer of one query and its rule-based update: Algorithm 2 of the paper.

Pure data and pure functions: no torch, no network, no clock. An update returns a new buffer and leaves the old one
alone. The names are the paper's: `K` anchors `a_1 < ... < a_K`, `sigma[p]` the rollouts of interval `p` from worst to
best for `p` in 0..K, `h` an anchor's inactivity counter, `H` the pruning threshold. Only indices differ: the paper
counts anchors from 1, Python from 0, so the paper's `a_k` is `anchors[k - 1]`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from .groups import Rollout

SOURCES = ("initial", "bootstrap", "left", "right", "refine", "selected", "candidate")


@dataclass(frozen=True)
class Anchor:
    """A response kept as a mark on the query's quality scale.

    Args:
        id (`str`):
            Unique within the query, for ever: `initial-3` or, for a rollout, `<step>-<rollout id>`.
        text (`str`):
            The response.
        source (`str`):
            Where it came from: `initial` (the data set's responses, Nectar in the paper), `bootstrap`, `left` or
            `right` (boundary expansion), `refine` (local refinement); under an LLM manager `selected` by it, or a
            `candidate` that waits for its decision.
        epoch (`int`):
            The epoch in which it was added, from 0.
        h (`int`, *optional*, defaults to `0`):
            Inactivity counter: consecutive epochs in which neither of its two intervals received a rollout.
    """

    id: str
    text: str
    source: str
    epoch: int
    h: int = 0


@dataclass(frozen=True)
class AnchorBuffer:
    """The anchors of one query from worst to best, and what the query remembers of its epochs.

    Args:
        anchors (`tuple[Anchor, ...]`):
            From worst to best, at least two.
        left_epoch (`int`, *optional*):
            The last epoch in which the left boundary was expanded.
        right_epoch (`int`, *optional*):
            The last epoch in which the right boundary was expanded.
        observed_epoch (`int`, *optional*):
            The last epoch in which inactivity was observed.
        visits (`int`, *optional*, defaults to `0`):
            How many groups of this query have been ranked in training, the one that built the buffer included.
    """

    anchors: tuple[Anchor, ...] = field(default=())
    left_epoch: int | None = None
    right_epoch: int | None = None
    observed_epoch: int | None = None
    visits: int = 0

    def __post_init__(self):
        if len(self.anchors) < 2:
            raise ValueError(f"a buffer needs at least 2 anchors, got {len(self.anchors)}")

    def __len__(self) -> int:
        """`K`, the number of anchors."""
        return len(self.anchors)

    def visited(self) -> "AnchorBuffer":
        """The same buffer after one more ranked group."""
        return replace(self, visits=self.visits + 1)

    def update(
        self,
        sigma: Sequence[Sequence[Rollout]],
        epoch: int,
        step: int,
        H: int = 3,
        refine_at: int = 3,
        unordered: Collection[int] = (),
    ) -> "AnchorBuffer":
        """`UpdateBuffer` (Algorithm 2; section "Rule-Based Buffer Update").

        Additions and prunings are both decided on the coordinates of the buffer before the update and merged at once.

        Args:
            sigma (`Sequence[Sequence[Rollout]]`):
                `K + 1` intervals, each holding its rollouts from worst to best.
            epoch (`int`):
                The epoch `e`, from 0.
            step (`int`):
                The trainer's global step; it names the added anchors.
            H (`int`, *optional*, defaults to `3`):
                An internal anchor is pruned once it was inactive for `H` consecutive epochs.
            refine_at (`int`, *optional*, defaults to `3`):
                An internal interval with at least this many rollouts gives its lower median as an anchor.
            unordered (`Collection[int]`, *optional*):
                Intervals whose fine ranking failed. Their rollouts count as activity, since the coarse judgments
                stand, but nobody knows which is best or in the middle, so they add no anchor.

        Returns:
            `AnchorBuffer`: the buffer for the next visit.
        """
        K = len(self)
        if len(sigma) != K + 1:
            raise ValueError(f"{K} anchors make {K + 1} intervals, got {len(sigma)}")

        anchors = list(self.anchors)
        pruned = set()
        if self.observed_epoch != epoch:
            for k in range(2, K):
                anchor = anchors[k - 1]
                h = 0 if sigma[k - 1] or sigma[k] else anchor.h + 1
                anchors[k - 1] = replace(anchor, h=h)
                if h >= H:
                    pruned.add(k)

        def new(rollout: Rollout, source: str) -> Anchor:
            return Anchor(f"{step}-{rollout.id}", rollout.text, source, epoch)

        merged = [(float(k), anchors[k - 1]) for k in range(1, K + 1) if k not in pruned]
        left_epoch, right_epoch = self.left_epoch, self.right_epoch
        if sigma[0] and left_epoch != epoch and 0 not in unordered:
            merged.append((0.5, new(sigma[0][0], "left")))
            left_epoch = epoch
        if sigma[K] and right_epoch != epoch and K not in unordered:
            merged.append((K + 0.5, new(sigma[K][-1], "right")))
            right_epoch = epoch
        for p in range(1, K):
            if len(sigma[p]) >= refine_at and p not in unordered:
                lower_median = (len(sigma[p]) + 1) // 2
                merged.append((p + 0.5, new(sigma[p][lower_median - 1], "refine")))

        merged.sort(key=lambda item: item[0])
        return replace(
            self,
            anchors=tuple(anchor for _, anchor in merged),
            left_epoch=left_epoch,
            right_epoch=right_epoch,
            observed_epoch=epoch,
        )


def select_k0(ordered: Sequence, k0: int) -> list:
    """`Select_K0`: `k0` items of a worst-to-best sequence, evenly spread, with both ends.

    Takes positions `round(i (n-1) / (k0-1))`, which gives the paper's subsets (appendix "Initial-anchor subsets"). A
    sequence shorter than `k0` is taken whole.

    Raises:
        `ValueError`: if `k0` is below 2.
    """
    if k0 < 2:
        raise ValueError(f"k0 must be at least 2 to keep both ends, got {k0}")
    n = len(ordered)
    if n <= k0:
        return list(ordered)
    return [ordered[round(i * (n - 1) / (k0 - 1))] for i in range(k0)]


def initial_buffer(responses: Sequence[str], k0: int) -> AnchorBuffer:
    """The buffer of a query whose data set has responses from worst to best (section "Buffer Initialization")."""
    anchors = (Anchor(f"initial-{i}", responses[i], "initial", 0) for i in select_k0(range(len(responses)), k0))
    return AnchorBuffer(tuple(anchors))


def bootstrap_buffer(sigma: Sequence[Rollout], k0: int, epoch: int, step: int) -> AnchorBuffer:
    """The buffer of a query whose first group was ranked listwise, worst to best (section "Buffer Initialization")."""
    chosen = select_k0(sigma, k0)
    return AnchorBuffer(tuple(Anchor(f"{step}-{rollout.id}", rollout.text, "bootstrap", epoch) for rollout in chosen))
