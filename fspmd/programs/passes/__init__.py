"""Passes over recorded programs. A pass changes a `Program` in place, and returns its gain."""
