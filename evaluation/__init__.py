"""Four official benchmarks for any checkpoint, with any OpenAI-compatible judge. Start with `evaluation/README.md`."""
