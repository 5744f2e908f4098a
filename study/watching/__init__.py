"""Records a user's own training: `with watch(...)` around a loop, or a callback of a Trainer."""
