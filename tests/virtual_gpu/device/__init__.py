"""The parts of the virtual GPU: the driver in C++, and what torch, TensorRT and the engine's runtime are on it."""
