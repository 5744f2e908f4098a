"""Numbers in human units, and rows as a table in the terminal."""
