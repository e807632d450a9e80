"""Emitters: a kernel in loop form and a schedule in, the text of a program out. No device is needed."""
