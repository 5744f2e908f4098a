"""Prepares a run before its first step and completes it after the last; the loop itself is in study/train.py."""
