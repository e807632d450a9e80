"""Coverage-guided fuzzing of every reader of files and every native entry: `make fuzz TARGET=… SECONDS=…`.

kit.py      what a target is, its kept corpus, and how inputs are mutated
readers/    targets in Python, run by atheris
native/     targets in C++, run by libFuzzer with ASAN and UBSAN, and the pools under TSAN
run.py      the command line
corpus/     a file for each target, an input on each line
"""
