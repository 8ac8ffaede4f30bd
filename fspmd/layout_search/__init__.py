"""The search for layouts: the op graph of a function, the cost of the strategies of its ops, and the cheapest plan."""
