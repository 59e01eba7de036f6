"""Reward methods beyond the paper: ours and relatives. All are off by default."""
