"""The predictor: memory, traffic and time of a training that is not run."""
