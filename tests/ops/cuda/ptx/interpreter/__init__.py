"""An interpreter of PTX text in numpy: every register is an array over the threads that execute together.

program reads the text; decoding turns an instruction into a function, by the tables of compute (with arithmetic and
rounding), conversions, transfers (memory, cp.async) and collectives (warps, barriers); group holds registers and says
who goes on where; machine runs a launch over a memory. Semantics are those of NVIDIA's PTX ISA 9.0. What is not
implemented raises PtxError when a kernel is decoded, what PTX leaves undefined when it happens.
"""
