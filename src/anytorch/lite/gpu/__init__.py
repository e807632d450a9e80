"""The same tensors on a GPU, through WebGPU: `CustomTensor(data, device="webgpu")`.

memory      a piece of device memory, given back when nobody uses it
kernels     elementwise ops, reductions and matrix products, launched
array       an array that answers to NumPy's functions, so that every op of the library takes it as it is
"""
