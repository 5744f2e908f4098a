"""Asks the installed libraries what they do, without training, and keeps their answers."""
