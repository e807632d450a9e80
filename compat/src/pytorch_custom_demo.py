"""Document 4's demo: `python pytorch_custom_demo.py [picture.png]` trains, times and draws (needs matplotlib)."""

import sys

from anytorch.lite.demo import demo

for line in demo(*sys.argv[1:2]):
    print(line)
