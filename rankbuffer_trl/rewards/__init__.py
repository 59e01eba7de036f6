"""Reward functions: one file per method."""
