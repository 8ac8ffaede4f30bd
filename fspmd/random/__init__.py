"""Random numbers that depend on the seed and the element alone, whatever the layout."""
