"""Whether fine-tuning helps: examples/finetune_forecast.py, with what it found kept as a results file.

    OMP_NUM_THREADS=1 python bench/finetune_example.py --output FOLDER [--results bench/results/finetune-forecast.json]

Every other argument is the example's. About seven minutes of one CPU core. What it does not show: real prices.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from provenance import provenance, write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import finetune_forecast as example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    options, rest = parser.parse_known_args()
    before = provenance()
    found = example.run(example.options_of(rest))
    if options.results:
        write_results(options.results, {**before, **found})


if __name__ == "__main__":
    main()
