"""Rewards for trainers that are not ours: one group at a time, in another process or over HTTP."""
