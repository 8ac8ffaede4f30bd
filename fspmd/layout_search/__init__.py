"""Layouts that are found, not written: the op graph of a function, what each way to lay it out costs, the cheapest."""
