"""Our arithmetic against the benchmarks' own: on official results, and beside official scripts."""
