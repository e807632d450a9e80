"""The same tensors on a GPU, through WebGPU: `CustomTensor(data, device="webgpu")`.

kernels     device memory, given back when nobody uses it; elementwise ops, a body per thread, rows by number, launched
folds       reductions, rules for rows, running sums, products of matrices
array       an array that answers to NumPy's functions, so that the ops of the library take it as it is
answers     what it answers, function by function
functions   what NumPy has no word for: convolution, pooling, normalising rows, recurrent steps
"""

from anytorch.errors import DeviceUnavailable

try:
    from anytorch.lite.gpu import answers as answers
except ImportError as exc:
    if "wgpu" not in str(exc):
        raise
    raise DeviceUnavailable(f"tensors on the GPU need the package wgpu: {exc}") from exc
