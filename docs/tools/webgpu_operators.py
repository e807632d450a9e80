"""Write docs/reference/webgpu-operators.md: what the webgpu device does with each of PyTorch's operators.

python docs/tools/webgpu_operators.py            writes the page if it differs
python docs/tools/webgpu_operators.py --check    changes nothing; exits with 1 if it differs

The table comes from the dispatcher's registrations, the totals of the operator suite from webgpu-operators.json, which
`python -m tests.webgpu.opinfo --all --output docs/reference/webgpu-operators.json` writes. No GPU is needed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "reference"
PAGE = REFERENCE / "webgpu-operators.md"
VERDICTS = REFERENCE / "webgpu-operators.json"

HEAD = """# Operators of the webgpu device

What happens to each operator of PyTorch {torch} on a tensor of the webgpu device:

- **native**: kernels of our own, in WGSL;
- **decomposed**: computed by other operators on the device, by PyTorch's own decompositions or ours;
- **fallback**: copied to the CPU, computed there, copied back. The first time each operator does so it is said
  (`ANYTORCH_WEBGPU_FALLBACK=error|warn|silent`), and `torch.webgpu.fallback_stats()` counts them.

A native operator still uses the CPU for a dtype that no shader has (complex128, float8). complex64 is computed on the
device by operators on its real and imaginary parts (add, mul, div, exp, log, abs, sums, products, Fourier transforms).

An index out of range reads zero and writes nothing, and `IndexError` is raised at the next wait for the GPU (`.item()`,
`.cpu()`, `synchronize`). `ANYTORCH_WEBGPU_CHECKS=now` raises it at the operator, as on the CPU, at a wait each; `off` none.

"""

OF_THESE = ("without the CPU", "by kind only", "as near as the CPU")

# Operators of one library's or one layout's own; no dense device has them.
FOREIGN = (
    "mkldnn",
    "cudnn",
    "miopen",
    "quantize",
    "fbgemm",
    "sparse",
    "nested",
    "_test_",
    "_foobar",
    "qint",
    "coalesce",
)


def registered(name: str, key: str) -> bool:
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def overloads() -> list[str]:
    import torch

    names: list[str] = torch._C._dispatch_get_all_op_names()  # type: ignore[attr-defined]
    return sorted(n for n in names if n.startswith("aten::") and not any(word in n for word in FOREIGN))


def form_of(name: str, native: set[str]) -> bool:
    """Is a structured op's functional or in-place form, made by torch of an out= form that is native?"""
    base = name.removeprefix("aten::").split(".")[0].removesuffix("_")
    return base in native


def classify() -> dict[str, str]:
    """Every overload with a kernel for dense tensors, and how the device computes it. Views are left out: all work."""
    from torch._C import _dispatch_has_kernel

    import anytorch.webgpu  # noqa: F401  (registers the device)
    from anytorch.webgpu.ops import decompositions

    made = set(decompositions.installed)
    found: dict[str, str] = {}
    outs: set[str] = set()
    waiting: list[str] = []
    for name in overloads():
        if not _dispatch_has_kernel(name) or is_view(name):
            continue
        if registered(name, "PrivateUse1"):
            found[name] = "decomposed" if name in made else "native"
            if writes_out(name):
                outs.add(name.removeprefix("aten::").split(".")[0])
        elif registered(name, "CompositeImplicitAutograd") or registered(name, "CompositeExplicitAutograd"):
            found[name] = "decomposed"
        elif registered(name, "CPU") or registered(name, "CompositeExplicitAutogradNonFunctional"):
            waiting.append(name)
    for name in waiting:
        structured = registered(name, "CompositeExplicitAutogradNonFunctional")
        if structured and form_of(name, outs):
            found[name] = "native"
        elif structured and not registered(name, "CPU"):
            found[name] = "decomposed"  # the *_copy forms of views
        else:
            found[name] = "fallback"
    return found


def schema(name: str) -> Any:
    import torch

    base, _, overload = name.removeprefix("aten::").partition(".")
    return torch._C._get_schema(f"aten::{base}", overload)


def is_view(name: str) -> bool:
    returns = schema(name).returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def writes_out(name: str) -> bool:
    arguments = schema(name).arguments
    return any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in arguments)


def sweep() -> str:
    if not VERDICTS.is_file():
        return ""
    stored = json.loads(VERDICTS.read_text("utf-8"))
    lines = [
        "## PyTorch's operator suite",
        "",
        f"Every entry of `op_db` (torch {stored['torch']}), forward and backward, up to {stored['samples']} samples each, "
        "against the CPU, on the software adapter.",
        "",
        "| dtype | agree | without the CPU | by kind only | as near as the CPU | wrong | error | not comparable |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for dtype, found in stored["totals"].items():
        kinds = ("agree", *OF_THESE, "wrong", "error", "not comparable")
        lines.append(f"| {dtype} | " + " | ".join(str(found.get(kind, 0)) for kind in kinds) + " |")
    lines += [
        "",
        "Of those that agree: *without the CPU*, no operator fell back; *by kind only*, random or uninitialised results, of "
        "which shape and dtype were compared; *as near as the CPU*, beyond the tolerance somewhere, but the largest error "
        "against float64 is at most twice the CPU's own.",
    ]
    if stored["troubles"]:
        lines += ["", "Not agreeing:", "", "| entry | dtype | verdict | reason |", "| --- | --- | --- | --- |"]
        for trouble in stored["troubles"]:
            reason = trouble["reason"].replace("|", "\\|")[:160]
            lines.append(f"| `{trouble['op']}` | {trouble['dtype']} | {trouble['status']} | {reason} |")
    return "\n".join(lines) + "\n\n"


def table(found: dict[str, str]) -> str:
    """A row per operator: its overloads by how they are computed."""
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, kind in found.items():
        base, _, overload = name.removeprefix("aten::").partition(".")
        rows[base][kind].append(overload or "default")
    counts = {kind: sum(k == kind for k in found.values()) for kind in ("native", "decomposed", "fallback")}
    lines = [
        "## Operators",
        "",
        f"{counts['native']} overloads are native, {counts['decomposed']} decomposed, {counts['fallback']} run on the CPU. "
        "Views always work on the device and are not listed.",
        "",
        "| operator | how |",
        "| --- | --- |",
    ]
    for base in sorted(rows):
        kinds = rows[base]
        if len(kinds) == 1:
            how = next(iter(kinds))
        else:
            how = "; ".join(f"{kind}: {', '.join(sorted(kinds[kind]))}" for kind in sorted(kinds, reverse=True))
        lines.append(f"| `{base}` | {how} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    import torch

    return HEAD.format(torch=torch.__version__.split("+")[0]) + sweep() + table(classify())


def main(arguments: list[str]) -> int:
    text = page()
    if PAGE.is_file() and PAGE.read_text("utf-8") == text:
        return 0
    checking = "--check" in arguments
    sys.stderr.write(f"{'stale' if checking else 'writing'}: reference/{PAGE.name}\n")
    if not checking:
        PAGE.write_text(text, "utf-8")
    return int(checking)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
