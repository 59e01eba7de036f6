"""What only informs: numbers of the log, probes, progress, the table of buffers and the cards."""
