"""Ways to compute a linear layer from packed weights. Each is a `Kernel`; `anytorch.quant.choose` picks by measurement."""
