"""Work recorded once and replayed, and the host's memory it is fed from. Importing this package imports nothing.

graphs    recording the work of one shape, and replaying it (torch)
staging   pinned memory in and out of the device, and the event that says when an answer is there (torch)
moves     ragged rows gathered and scattered in C++, or by NumPy where there is no compiler
"""
