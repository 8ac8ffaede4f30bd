"""Watching communication: its causes, logs of it, and refusals of communication that is not written."""
