"""Recorded programs: what a function did below autograd, put down once and run again."""
