"""WritingBench."""
