"""From one layout to another: steps, their price, and the cheapest route."""
