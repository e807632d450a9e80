"""Back ends of kernel graphs: a kernel and a schedule in, something that runs on torch tensors out."""
