"""Decoders as TensorRT networks: segments of layers, cut where rows can be dropped, and the early-exit projection."""
