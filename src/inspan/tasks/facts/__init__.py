"""A task set over real facts: countries and cities, cut into pages; wide, deep, mixed, long and narrow questions."""
