"""The predictor: memory, traffic and time of a training that is not run.

Read `training.py` and `placement.py`, `engines/base.py` and an engine, `estimate.py`, `step_time.py`, `prediction.py`,
then `advise.py`.
"""
