"""The engine on a GPU: Triton kernels, CUDA graphs, steps launched one behind the other."""
