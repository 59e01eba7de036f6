"""Judge the stored rollouts of a run again: replays with another judge, and duels of the first and the last epoch."""
