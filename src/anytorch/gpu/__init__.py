"""A WebGPU runtime and WGSL generators with no torch: what `anytorch.webgpu` and `anytorch.lite` both stand on.

    adapters    which GPU, and by what name
    native      the raw calls of wgpu-native's library
    buffers     device memory, pooled
    programs    compiled shaders, bound to their buffers
    runtime     one device: recording, submitting, waiting
    transfer    to the device and back
    wgsl/       text generators: data in, shader text out

Importing this package imports nothing; opening a device takes `runtime.open_runtime()`.
"""
