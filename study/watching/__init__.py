"""The record of somebody else's training: `with watch(...)` around a loop, or a callback of a Trainer."""
