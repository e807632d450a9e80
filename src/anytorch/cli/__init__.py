"""The command line: translates arguments into calls of the layers below and their answers into text or JSON.

`main` splits the command from the global options and imports that one command's module; each module in `commands` has
`arguments(parser)` and `run(options, output)`, which returns the exit status.
"""
