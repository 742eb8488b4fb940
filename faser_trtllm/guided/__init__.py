"""Guides for guided decoding: JSON schemas, regexes and grammars, compiled by llguidance for the engine's tokenizer."""
