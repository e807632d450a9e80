"""Our Triton kernels (`*_source`), each beside its launcher, and the measured choice between them and torch's own."""
