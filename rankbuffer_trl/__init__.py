"""RankBuffer: ranking-based rewards for GRPO at close to pointwise cost, on TRL."""

__version__ = "0.1.0"
