"""Monitoring of a run: numbers of the log, probes, progress, the table of buffers and the model card."""
