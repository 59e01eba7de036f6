"""Four official benchmarks for any checkpoint, with any OpenAI-compatible judge. `evaluation/README.md` begins it."""
