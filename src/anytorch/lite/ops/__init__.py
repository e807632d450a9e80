"""The ops: each computes its result with NumPy and says, in one line, what its gradient is."""
