"""Scheduling of rows: prefill, decode batches, preemption and the prefix cache of rows."""
