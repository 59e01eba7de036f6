"""The report of a run: numbers, tables and figures from its store."""
