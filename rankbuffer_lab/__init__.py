"""The laboratory: what is found out about a judge or a run. Training imports nothing of it."""
