"""Speculative decoding managed at the grain of one row of one request."""

__version__ = "0.1.0"
