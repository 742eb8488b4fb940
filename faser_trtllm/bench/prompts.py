"""Real prompts for benches, shared with `faser profile`."""

from faser_trtllm.profiling.prompts import HELD_OUT_STRIDE, PromptSet, draw_prompts, library_files

__all__ = ["HELD_OUT_STRIDE", "PromptSet", "draw_prompts", "library_files"]
