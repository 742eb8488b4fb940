"""A few instructions, interpreted for each thread of a block with numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ops.cuda.ptx.interpreter.machine import Machine
from tests.ops.cuda.ptx.interpreter.memory import Memory
from tests.ops.cuda.ptx.interpreter.program import Program

HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n"


def interpret(
    body: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[str] = ("u4",),
    declare: str = "",
    pointers: Sequence[np.ndarray] = (),
    **options,
) -> list[np.ndarray]:
    """Thread t finds entry t of each input in %a0, %a1 ... and leaves %d0, %d1 ..., of numpy types `outputs`.

    Registers are of 16, 32 or 64 bits; %t is the thread, %p0 to %p9, %x0 to %x9 (32 bits) and %y0 to %y9 (64) are free.
    pointers: arrays whose addresses are parameters q0, q1 ... options: of Machine.
    """
    num_threads = len(inputs[0])
    found = [np.zeros(num_threads, kind) for kind in outputs]
    arrays = [np.ascontiguousarray(array) for array in inputs] + found
    names = [f"%a{i}" for i in range(len(inputs))] + [f"%d{i}" for i in range(len(found))]
    lines = [f".reg .b{8 * array.itemsize} {name};" for name, array in zip(names, arrays, strict=True)]
    lines += [".reg .pred %p<10>;", ".reg .b32 %x<10>;", ".reg .b64 %y<10>;", ".reg .b32 %t;", declare]
    lines += [f".reg .b64 %at<{len(arrays)}>;", "mov.u32 %t, %tid.x;"]
    for i, array in enumerate(arrays):
        lines += [f"ld.param.u64 %at{i}, [p{i}];", f"mad.wide.u32 %at{i}, %t, {array.itemsize}, %at{i};"]
        if i < len(inputs):
            lines.append(f"ld.global.b{8 * array.itemsize} %a{i}, [%at{i}];")
    lines.append(body)
    for i in range(len(inputs), len(arrays)):
        lines.append(f"st.global.b{8 * arrays[i].itemsize} [%at{i}], {names[i]};")
    parameters = ", ".join(
        [f".param .u64 p{i}" for i in range(len(arrays))] + [f".param .u64 q{i}" for i in range(len(pointers))]
    )
    text = f"{HEADER}.visible .entry snippet({parameters})\n{{\n" + "\n".join([*lines, "ret;", "}", ""])
    memory = Memory()
    for array in (*arrays, *pointers):
        memory.add_array(array)
    addresses = [array.ctypes.data for array in (*arrays, *pointers)]
    Machine(Program(text), memory, **options).launch("snippet", (1, 1, 1), (num_threads, 1, 1), addresses)
    return found
