"""What is wrong in a run, how two configs or runs differ, and where ranks wait. Reads records and files; no torch."""
