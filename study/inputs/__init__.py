"""Names, files and texts that may come from a stranger, with their limits. Uses the standard library only."""
