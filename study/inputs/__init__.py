"""What may come from a stranger: names, files and texts, with their limits. With Python's own library only."""
