"""Checkpoints of pytrees in torch's files, and weights in those of Hugging Face."""
