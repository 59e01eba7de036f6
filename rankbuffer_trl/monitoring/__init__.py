"""Monitoring of a run: numbers of the log, probes, progress, the table of buffers and the model card."""

from ._buffer_sizes import buffer_size_table, epoch_ends
from ._card_template import Markdown, code, escaped, fill_card
from ._probes import PROBE_NAMES, probe, sign, summary, tau_b
