"""Recorded programs: the steps of a function below autograd, recorded once and run again."""
