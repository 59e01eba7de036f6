"""Reward methods, one file each, and the format reward."""
