"""Virtual Blackwell's optimizations: see `apt_model.optimization.npu_backend`."""
