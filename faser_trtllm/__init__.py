"""Speculative decoding with a draft length per request and step, for TensorRT-LLM and NVIDIA Triton."""

__version__ = "0.2.0"
