"""The adapters of this study. Each file stands alone: it imports nothing of ours, and is what a stranger writes."""
