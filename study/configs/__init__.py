"""Anybody's config, log or error: read, described and compared. Needs no torch."""
