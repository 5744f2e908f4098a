"""Tensor, pipeline, context and expert parallelism, as Megatron-LM has them: the traced layers, divided."""
