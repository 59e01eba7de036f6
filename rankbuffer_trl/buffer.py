"""The ordered anchor buffer of one query and its rule-based update: Algorithm 2 of the paper.

Everything here is immutable data and pure functions: no torch, no network, no clock. An update returns a new buffer
and does not change the old one.

The names are the paper's. A buffer has `K` anchors `a_1 < ... < a_K`. `sigma[p]` holds the rollouts of interval `p`
from worst to best, for `p` in 0..K. `h` is an anchor's inactivity counter, and `H` is the pruning threshold. Only the
indices differ: the paper counts anchors from 1 and Python counts from 0, so the paper's `a_k` is `anchors[k - 1]`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from .groups import Rollout

SOURCES = ("initial", "bootstrap", "left", "right", "refine", "selected", "candidate")


@dataclass(frozen=True)
class Anchor:
    """A response that marks a level on the quality scale of its query.

    Args:
        id (`str`):
            Unique within the query and never used again: `initial-3`, or `<step>-<rollout id>` for a rollout.
        source (`str`):
            The rule that added the anchor: `initial` (the data set's responses, Nectar in the paper), `bootstrap`,
            `left` or `right` (boundary expansion), or `refine` (local refinement). With an LLM manager it is
            `selected`, or `candidate` for a rollout about which the manager has not yet decided.
        epoch (`int`):
            The epoch in which the anchor was added, from 0.
        h (`int`, *optional*, defaults to `0`):
            The inactivity counter: the number of consecutive epochs in which neither of its two intervals received a
            rollout.
    """

    id: str
    text: str
    source: str
    epoch: int
    h: int = 0


@dataclass(frozen=True)
class AnchorBuffer:
    """The anchors of one query from worst to best, and the epochs of the last changes.

    Args:
        anchors (`tuple[Anchor, ...]`):
            From worst to best, at least two.
        left_epoch, right_epoch (`int`, *optional*):
            The last epochs in which the boundaries were expanded.
        observed_epoch (`int`, *optional*):
            The last epoch in which inactivity was observed.
        visits (`int`, *optional*, defaults to `0`):
            The number of this query's groups that were ranked in training, with the one that built the buffer.
    """

    anchors: tuple[Anchor, ...] = field(default=())
    left_epoch: int | None = None
    right_epoch: int | None = None
    observed_epoch: int | None = None
    visits: int = 0

    def __post_init__(self):
        if len(self.anchors) < 2:
            # Else it has no internal interval.
            raise ValueError(f"a buffer needs at least 2 anchors, got {len(self.anchors)}")

    def __len__(self) -> int:
        """Return `K`, the number of anchors."""
        return len(self.anchors)

    def visited(self) -> "AnchorBuffer":
        """Return the same buffer after one more ranked group."""
        return replace(self, visits=self.visits + 1)

    def thinned(self, most: int) -> "AnchorBuffer":
        """Return the same buffer with at most so many anchors: both ends, and an even choice of the others."""
        return replace(self, anchors=tuple(select_k0(self.anchors, most)))

    def update(
        self,
        sigma: Sequence[Sequence[Rollout]],
        epoch: int,
        step: int,
        H: int = 3,
        refine_at: int = 3,
        unordered: Collection[int] = (),
    ) -> "AnchorBuffer":
        """Return the buffer for the next visit: `UpdateBuffer` (Algorithm 2; section "Rule-Based Buffer Update").

        Args:
            sigma (`Sequence[Sequence[Rollout]]`):
                `K + 1` intervals, each holding its rollouts from worst to best.
            epoch (`int`):
                The epoch `e`, from 0.
            step (`int`):
                The trainer's global step. It is part of the added anchors' ids.
            H (`int`, *optional*, defaults to `3`):
                An internal anchor is pruned when it was inactive in `H` consecutive epochs. At least 1.
            refine_at (`int`, *optional*, defaults to `3`):
                An internal interval with at least this many rollouts adds its lower median as an anchor. At least 1.
            unordered (`Collection[int]`, *optional*):
                Intervals whose fine ranking failed.
        """
        K = len(self)
        if len(sigma) != K + 1:
            raise ValueError(f"{K} anchors make {K + 1} intervals, got {len(sigma)}")

        anchors = list(self.anchors)
        pruned = set()
        if self.observed_epoch != epoch:  # `h` counts epochs, so one look an epoch
            for k in range(2, K):  # the two boundary anchors are never pruned
                anchor = anchors[k - 1]
                # Also those of `unordered`: their coarse judgments are valid.
                h = 0 if sigma[k - 1] or sigma[k] else anchor.h + 1
                anchors[k - 1] = replace(anchor, h=h)
                if h >= H:
                    pruned.add(k)

        def new_anchor(rollout: Rollout, source: str) -> Anchor:
            return Anchor(f"{step}-{rollout.id}", rollout.text, source, epoch)

        # Additions and prunings are both decided on the coordinates of the buffer before the update, then merged at
        # once: anchor k has the coordinate k, and a new anchor of interval p has the coordinate p + 1/2.
        merged = [(float(k), anchors[k - 1]) for k in range(1, K + 1) if k not in pruned]
        left_epoch, right_epoch = self.left_epoch, self.right_epoch
        # Without an order, which rollout is the worst is not known.
        if sigma[0] and left_epoch != epoch and 0 not in unordered:
            merged.append((0.5, new_anchor(sigma[0][0], "left")))
            left_epoch = epoch
        if sigma[K] and right_epoch != epoch and K not in unordered:
            merged.append((K + 0.5, new_anchor(sigma[K][-1], "right")))
            right_epoch = epoch
        for p in range(1, K):
            if len(sigma[p]) >= refine_at and p not in unordered:
                lower_median = (len(sigma[p]) + 1) // 2
                merged.append((p + 0.5, new_anchor(sigma[p][lower_median - 1], "refine")))

        merged.sort(key=lambda item: item[0])
        return replace(
            self,
            anchors=tuple(anchor for _, anchor in merged),
            left_epoch=left_epoch,
            right_epoch=right_epoch,
            observed_epoch=epoch,
        )


def select_k0(ordered: Sequence, k0: int) -> list:
    """Return `k0` evenly spread items of a worst-to-best sequence, with both ends: the paper's `Select_K0`.

    If the sequence has fewer than `k0` items, all of them are returned.

    Raises:
        `ValueError`: if `k0` is below 2.
    """
    if k0 < 2:
        raise ValueError(f"k0 must be at least 2 to keep both ends, got {k0}")
    n = len(ordered)
    if n <= k0:
        return list(ordered)
    # This gives the paper's subsets (appendix "Initial-anchor subsets").
    return [ordered[round(i * (n - 1) / (k0 - 1))] for i in range(k0)]


def initial_buffer(responses: Sequence[str], k0: int) -> AnchorBuffer:
    """Return the first buffer of a query with reference responses, worst to best (section "Buffer Initialization")."""
    anchors = (Anchor(f"initial-{i}", responses[i], "initial", 0) for i in select_k0(range(len(responses)), k0))
    return AnchorBuffer(tuple(anchors))


def bootstrap_buffer(sigma: Sequence[Rollout], k0: int, epoch: int, step: int) -> AnchorBuffer:
    """Return the first buffer from a listwise ranking of a group, worst to best (section "Buffer Initialization")."""
    chosen = select_k0(sigma, k0)
    return AnchorBuffer(tuple(Anchor(f"{step}-{rollout.id}", rollout.text, "bootstrap", epoch) for rollout in chosen))
