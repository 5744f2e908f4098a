"""Finds what is wrong in a run, how two configs or runs differ, and where ranks wait. It needs no torch."""
