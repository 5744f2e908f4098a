"""Several machines: compare them, and launch on them."""
