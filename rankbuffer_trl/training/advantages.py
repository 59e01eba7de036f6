"""What the rewards of a group give: whether they differ, and how much the groups that differ weigh."""

import torch


def tied_groups(rewards: torch.Tensor, weights: torch.Tensor, G: int) -> torch.Tensor:
    """Return for each group whether its total rewards are all equal, of shape (groups,).

    Args:
        rewards (`torch.Tensor`):
            The rewards, of shape (groups * G, functions). NaN counts as 0.
        weights (`torch.Tensor`):
            The weights of the functions, of shape (functions,).
        G (`int`):
            The number of rollouts in a group.
    """
    totals = (rewards * weights.to(rewards)).nansum(dim=1).view(-1, G)
    return totals.amax(dim=1) == totals.amin(dim=1)


def scale_by_signal(rewards: torch.Tensor, weights: torch.Tensor, G: int) -> torch.Tensor:
    """Divide rewards, of shape (groups * G, functions), by the share of groups whose total rewards differ (GPG).

    Groups without a difference have no gradient, and the division gives their weight to the others (GPG's alpha). If
    no group has a difference, or all have one, nothing changes. NaN in column 0 is unscored.
    """
    totals = (rewards * weights.to(rewards)).nansum(dim=1).view(-1, G)
    scored = ~torch.isnan(rewards[:, 0]).view(-1, G)
    highest = totals.masked_fill(~scored, -torch.inf).amax(dim=1)
    lowest = totals.masked_fill(~scored, torch.inf).amin(dim=1)
    share = (highest > lowest).float().mean()
    return rewards / share if share > 0 else rewards
