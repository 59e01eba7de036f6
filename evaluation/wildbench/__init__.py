"""WildBench v2."""
