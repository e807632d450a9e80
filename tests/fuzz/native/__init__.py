"""Targets in C++: each native entry with ASAN and UBSAN under libFuzzer, the pools under TSAN."""
