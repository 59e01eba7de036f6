"""How much the groups weigh whose rewards differ (GPG)."""

import torch


def scale_by_signal(rewards: torch.Tensor, weights: torch.Tensor, G: int) -> torch.Tensor:
    """Divide rewards, of shape (groups * G, functions), by the share of groups whose total rewards differ (GPG).

    NaN in column 0 is unscored.
    """
    totals = (rewards * weights.to(rewards)).nansum(dim=1).view(-1, G)
    scored = ~torch.isnan(rewards[:, 0]).view(-1, G)
    highest = totals.masked_fill(~scored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(~scored, torch.inf).amin(dim=1)
    share = (highest > lowest).float().mean()
    # Groups without a difference have no gradient; the others get their weight (GPG's alpha).
    return rewards / share if share > 0 else rewards
