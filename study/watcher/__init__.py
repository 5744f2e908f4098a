"""The watcher: what somebody's own training does, what is wrong in it, and why it differs or hangs."""
