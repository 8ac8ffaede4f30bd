"""Who communicates, and why: causes, logs and refusals."""
