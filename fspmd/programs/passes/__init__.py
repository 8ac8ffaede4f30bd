"""Passes over recorded programs: each changes a `Program` in place, and says how much it has gained."""
