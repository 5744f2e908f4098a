"""Reading and writing: files from strangers, numbers and tables for people."""
