"""An error about memory, explained: what its size is, what made it, and which change would fit."""
