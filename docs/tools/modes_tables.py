"""What modes do to a model, from bench/modes.py: parts of docs/benchmarks.md, README.md and docs/guide/modes.md."""

# ruff: noqa: E501  (a row of a table is a line)

from __future__ import annotations

from typing import Any

from results_files import features, few, origin, part, read, table, there

FILES = ("modes-cpu", "modes-cpu-few", "modes-h200")
NAMES = {
    "plain": "plain torch, float32",
    "autocast": "torch's autocast",
    "speed": "`speed`",
    "balanced": "`balanced`",
    "memory": "`memory`",
}
NONE = "Not measured yet: `bench/modes.py` has written no file."


def place(found: dict[str, Any]) -> str:
    asked = found["options"]
    device = (
        features(found["machine"])
        if found["device"] == "cpu"
        else ", ".join(found["machine"]["gpus"]) or found["device"]
    )
    return f"{device}: {asked['layers']} blocks of width {asked['width']}, {asked['rows']} × {asked['tokens']} tokens"


def rows_of(found: dict[str, Any], which: str) -> list[list[str]]:
    plain = found[which]["plain"]
    rows = []
    for name, one in found[which].items():
        answer = (
            f"{one['least_cosine']:.5f}" if which == "inference" else f"{one['losses'][0]:.4f}, {one['losses'][-1]:.4f}"
        )
        rows.append(
            [f"{which}, {NAMES[name]}" + (f", {one['dtype']}" if one["dtype"] != "float32" else ""),
             f"{few(1e3 * one['median_s'])} ms", f"{plain['median_s'] / one['median_s']:.2f}",
             f"{one['peak_nbytes'] / 2**20:,.0f}", f"{one['held_nbytes'] / 2**20:,.0f}", f"{one['resident_nbytes'] / 2**20:,.0f}", answer]
        )  # fmt: skip
    return rows


@part("modes")
def modes() -> str:
    told = []
    for file in filter(there, FILES):
        found = read(file)
        rows = [row for which in ("inference", "training") if which in found for row in rows_of(found, which)]
        head = [
            "",
            "a call or step",
            "times as fast as plain",
            "MiB at most",
            "MiB held",
            "of them weights",
            "least cosine, or first and last loss",
        ]
        left = "; ".join(["", *found["left_out"]])
        told.append(
            f"{place(found)}\n\n{table(head, rows)}\n\n{found['options']['rounds']} rounds, torch {found['torch']}; {origin(file)}{left}; "
            f"`bench/results/{file}.json`."
        )
    return "\n\n".join(told) or NONE


@part("modes-losses")
def losses() -> str:
    """The loss curve: training under a mode beside plain training, at five steps of the run."""
    told = []
    for file in filter(there, FILES):
        found = read(file).get("training")
        if not found:
            continue
        plain = found["plain"]["losses"]
        steps = sorted({round(part * (len(plain) - 1) / 4) for part in range(5)})
        rows = []
        for name, one in found.items():
            apart = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], plain, strict=True))
            cells = [f"{one['losses'][step]:.4f}" for step in steps]
            rows.append([NAMES[name], *cells, "" if name == "plain" else f"{100 * apart:.2g} %"])
        head = [
            f"loss ({read(file)['device']}, {read(file)['options']['rows']} × {read(file)['options']['tokens']} tokens)",
            *(f"step {step + 1}" for step in steps),
            "largest difference from plain",
        ]
        told.append(f"{table(head, rows)}\n\n`bench/results/{file}.json`.")
    return "\n\n".join(told) or NONE


def headline() -> str:
    """One sentence for the tables that lead; empty where nothing was measured."""
    if not there("modes-cpu"):
        return ""
    found = read("modes-cpu")
    inference, training = found["inference"], found.get("training")

    def times(which: dict[str, Any], name: str) -> str:
        return f"{which['plain']['median_s'] / which[name]['median_s']:.2f}"

    memory, plain = inference["memory"], inference["plain"]
    own = f" (torch's own autocast {times(inference, 'autocast')})" if "autocast" in inference else ""
    few_rows = read("modes-cpu-few")["inference"] if there("modes-cpu-few") else None
    with_few = (
        f", and {times(few_rows, 'balanced')} and {times(few_rows, 'memory')} with two tokens" if few_rows else ""
    )
    text = (
        f"{features(found['machine'])}: inference {times(inference, 'balanced')} times as fast in `balanced`{own}, {times(inference, 'memory')} in `memory`{with_few}; "
        f"`memory`'s weights take {memory['resident_nbytes'] / 2**20:.0f} of {plain['resident_nbytes'] / 2**20:.0f} MiB"
    )
    return text + (
        f"; a training step {times(training, 'balanced')} and {times(training, 'memory')} times" if training else ""
    )


@part("modes-guide")
def guide() -> str:
    return f"On a CPU ({headline()}; `bench/results/modes-cpu.json`)." if headline() else NONE
