"""Conformance: is a sharded training equal to DDP, on the same weights and data, with the same arithmetic?"""
