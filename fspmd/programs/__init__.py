"""Recorded programs: the steps of a function below autograd, which are recorded once and run in every call."""
