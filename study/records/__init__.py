"""The record of a run: its schema, how it is read and written, and which runs are comparable."""
