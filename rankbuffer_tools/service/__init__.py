"""Servers: rank rewards for trainers that are not ours, and the embedded judge over HTTP."""
