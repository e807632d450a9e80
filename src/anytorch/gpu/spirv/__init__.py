"""SPIR-V kernels for what WGSL cannot say: cooperative matrices. Written out word by word, so that no compiler is needed."""
