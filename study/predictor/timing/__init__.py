"""The seconds of a step: the work of each block, the pace of a machine, and a timeline."""
