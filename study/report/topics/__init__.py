"""What the pages and notebooks show, one module for each topic: table, title, figure and sentence."""
