"""`python -m anytorch`."""

from anytorch.cli.main import run

if __name__ == "__main__":
    run()
