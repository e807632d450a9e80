"""Write docs/reference/webgpu-pytorch-tests.md from webgpu-pytorch-tests.json, which `make test-webgpu-pytorch` writes.

python docs/tools/webgpu_pytorch_tests.py            writes the page if it differs
python docs/tools/webgpu_pytorch_tests.py --check    changes nothing; exits with 1 if it differs
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "reference"
PAGE = REFERENCE / "webgpu-pytorch-tests.md"
RESULTS = REFERENCE / "webgpu-pytorch-tests.json"

HEAD = """# PyTorch's own tests on the webgpu device

`make test-webgpu-pytorch` fetches PyTorch's test sources (Debian's source package; nothing of it is in this repository),
runs its device tests on the CPU and on webgpu in one process, test by test, and writes this page. What fails on the CPU as
well does not count: the sources are of PyTorch {sources}, the installed one is {torch}. `MINUTES=240` runs more of them; the
next run goes on where the last one ended.

On the adapter {adapter}: **{run:,} of {collected:,} tests were run; {cpu:,} pass on the CPU.** Of these {both:,} pass on
webgpu, {failed} fail, {by_design} are out by design, {skipped} are skipped by PyTorch's own decorators, and {late} took
longer than a test may. That is **{share:.1f} % of what counts**; {wrong} failures are different numbers, {aborted} ended the
process.
{without_cpu:,} of the passing tests ran without an operator on the CPU.

The run had {minutes:g} minutes for all files; those that are not complete were sampled evenly over test functions, operators
and dtypes (float32 first). All results are of one state of the code, commit `{commit}`; what was mended since still
stands below. A file with 0 tests could not be loaded.

| file | run | of | pass on the CPU | pass on webgpu | fail | by design | skipped | late |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def page(found: dict[str, Any]) -> str:
    total = found["totals"]
    counted = total["both"] + total["failed"] + total["aborted"]
    share = 100 * total["both"] / max(counted, 1)
    about = {**{name: 0 for name in ("wrong", "aborted", "late")}, **total}
    lines = [
        HEAD.format(
            share=share, **{name: found[name] for name in ("torch", "sources", "adapter", "minutes", "commit")}, **about
        )
    ]
    reasons: Counter[str] = Counter()
    for one in found["files"]:
        reasons.update(one["reasons"])
        names = ("run", "collected", "cpu", "both", "failed", "by_design", "skipped", "late")
        lines.append(f"| {one['file']} | " + " | ".join(str(one[name]) for name in names) + " |\n")
    lines.append("\n## Out by design\n\n")
    lines += [f"* {reason} ({count})\n" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]
    lines.append("\n## What fails\n\n")
    troubles = [(one["file"], trouble) for one in found["files"] for trouble in one["troubles"]]
    lines.append("| test | kind | error |\n| --- | --- | --- |\n" if troubles else "Nothing.\n")
    for file, trouble in troubles:
        why = trouble["why"].replace("|", "\\|").replace("<", "&lt;").replace("`", "'")[:160]
        lines.append(f"| {file}: {trouble['test'].replace('_', chr(92) + '_')} | {trouble['kind']} | `{why}` |\n")
    return "".join(lines)


def main() -> int:
    text = page(json.loads(RESULTS.read_text("utf-8")))
    if PAGE.exists() and PAGE.read_text("utf-8") == text:
        return 0
    if "--check" in sys.argv:
        sys.stderr.write(f"{PAGE} is not what {Path(__file__).name} writes; run it\n")
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
