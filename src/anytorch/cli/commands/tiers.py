"""`anytorch tiers`: the levels of memory of this machine, measured."""

from __future__ import annotations

import argparse

from anytorch.cli.output import Output


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="the device to measure as level 0 (default: the best device)"
    )
    parser.add_argument("--disk", metavar="FOLDER", help="a folder on the disk to measure (default: the cache folder)")
    parser.add_argument("--refresh", action="store_true", help="measure again, even if a result is cached")


def run(options: argparse.Namespace, output: Output) -> int:
    from pathlib import Path

    from anytorch import settings
    from anytorch.cli.requests import named_device
    from anytorch.devices.choose import resolve
    from anytorch.memory.levels import create_tiers, disk_speed, link_speed
    from anytorch.memory.sizes import words

    with output.fallbacks_told():
        device = resolve(named_device(options.device, "--device")).device
    folder = Path(options.disk) if options.disk else settings.cache_folder() / "tiers"
    if options.refresh:
        disk_speed(folder, refresh=True)
        if device.type != "cpu":
            link_speed(device, refresh=True)
    tiers = create_tiers(device, disk=folder, device_bandwidth=True)
    if output.json:
        output.data({"shared": tiers.shared, "levels": list(tiers.levels)})
        return 0
    rows = [
        (
            level.index,
            level.kind + (" (pinned)" if level.pinned else ""),
            level.place,
            words(level.capacity),
            level.source,
            "" if level.read_gb_per_s is None else f"{level.read_gb_per_s:.3g}",
            "" if level.write_gb_per_s is None else f"{level.write_gb_per_s:.3g}",
        )
        for level in tiers.levels
    ]
    columns = ("level", "kind", "where", "usable", "which is", "read (GB/s)", "write (GB/s)")
    output.table(columns, rows, title="levels of memory, fastest first")
    if tiers.shared:
        output.text("this device computes in the host's own memory: there is no copy between level 0 and the host")
    return 0
