"""The compiled PrivateUse1 device: first that the fake is what it says, then our device layer on top of it.

One process holds one PrivateUse1 device, so each test is a script in a process of its own. In the scripts `npu` is the
device's module (`torch.npu`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20


# --- the fake itself -----------------------------------------------------------------------------------------------


def test_torch_finds_two_devices_and_refuses_a_third(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        def error(call):
            try:
                call()
            except RuntimeError as exc:
                return str(exc)
        answer(
            accelerator=str(torch.accelerator.current_accelerator(check_available=True)),
            count=torch.accelerator.device_count(),
            initialized_before=npu.is_initialized(),
            device=str(torch.ones(1, device="npu:1").device),
            initialized_after=npu.is_initialized(),
            current=npu.current_device(),
            third=error(lambda: torch.ones(1, device="npu:2")),
            set_third=error(lambda: npu.set_device(2)),
            dtypes=sorted(str(d) for d in torch.accelerator.get_device_capability()["supported_dtypes"]),
        )
        """
    )
    assert answers["accelerator"] == "npu"
    assert answers["count"] == 2
    assert (answers["initialized_before"], answers["initialized_after"]) == (False, True)
    assert answers["device"] == "npu:1"
    assert answers["current"] == 0
    assert "invalid device ordinal: 2" in answers["third"]
    assert "invalid device ordinal: 2" in answers["set_third"]
    assert "torch.bfloat16" in answers["dtypes"]
    assert "torch.float64" not in answers["dtypes"]


def test_it_takes_another_name(npu_extension: Any) -> None:
    answers = npu_extension.run(
        "answer(device=str(torch.ones(2, device='oddity').device), module=torch.oddity.device_count())",
        name="oddity",
        count=1,
    )
    assert answers == {"device": "oddity:0", "module": 1}


def test_statistics_are_those_of_a_caching_allocator(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        def figures():
            free, _ = npu.mem_get_info(1)
            return [npu.memory_allocated(1), npu.memory_reserved(1), npu.max_memory_allocated(1), free]
        empty = figures()
        x = torch.empty(3 << 20, dtype=torch.uint8, device="npu:1")
        y = torch.empty(100, dtype=torch.uint8, device="npu:1")
        held = figures()
        del x, y
        freed = figures()
        again = torch.empty(3 << 20, dtype=torch.uint8, device="npu:1")
        reused = figures()
        del again
        npu.empty_cache()
        npu.reset_peak_memory_stats(1)
        emptied = figures()
        answer(empty=empty, held=held, freed=freed, reused=reused, emptied=emptied, other=npu.memory_reserved(0),
               stats=npu.memory_stats(1)["allocation.all.allocated"], emptied_caches=npu.counter("emptied_caches"))
        """,
        capacity=64 * MIB,
    )
    allocated, reserved = 3 * MIB + 512, 6 * MIB  # blocks of 512 bytes in segments of 2 MiB: 4 MiB and 2 MiB
    assert answers["empty"] == [0, 0, 0, 64 * MIB]
    assert answers["held"] == [allocated, reserved, allocated, 58 * MIB]
    assert answers["freed"] == [0, reserved, allocated, 58 * MIB]
    assert answers["reused"] == [3 * MIB, reserved, allocated, 58 * MIB]
    assert answers["emptied"] == [0, 0, 0, 64 * MIB]
    assert answers["other"] == 0
    assert answers["stats"] == 3
    assert answers["emptied_caches"] == 1


def test_out_of_memory_is_torchs_own_error_after_the_cache_was_given_back(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        cached = torch.empty(6 << 20, dtype=torch.uint8, device="npu:0")
        del cached
        fits = torch.empty(7 << 20, dtype=torch.uint8, device="npu:0")  # only if the cached 6 MiB are released
        try:
            torch.empty(4 << 20, dtype=torch.uint8, device="npu:0")
        except torch.OutOfMemoryError as exc:
            message = str(exc)
        stats = npu.memory_stats(0)
        torch.empty(4 << 20, dtype=torch.uint8, device="npu:1")  # the other device has room
        answer(message=message, ooms=stats["num_ooms"], retries=stats["num_alloc_retries"])
        """,
        capacity=8 * MIB,
    )
    assert answers["message"].startswith(
        "NPU out of memory. Tried to allocate 4.00 MiB (NPU 0; 8.00 MiB total capacity; 7.00 MiB already allocated;"
    )
    assert (answers["ooms"], answers["retries"]) == (1, 2)


def test_one_training_step_is_the_cpus(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        def step(device):
            torch.manual_seed(0)
            layer = torch.nn.Linear(8, 3)
            inputs, targets = torch.randn(16, 8), torch.randn(16, 3)
            layer, inputs, targets = layer.to(device), inputs.to(device), targets.to(device)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
            before = torch.nn.functional.mse_loss(layer(inputs), targets)
            before.backward()
            optimizer.step()
            after = torch.nn.functional.mse_loss(layer(inputs), targets)
            return before.item(), after.item(), layer.weight.detach()
        ours, reference = step("npu:1"), step("cpu")
        answer(device=str(ours[2].device), losses=[ours[0], ours[1]],
               same=torch.allclose(ours[2].cpu(), reference[2]) and abs(ours[1] - reference[1]) < 1e-6)
        """
    )
    assert answers["device"] == "npu:1"
    assert answers["losses"][1] < answers["losses"][0]
    assert answers["same"]


def test_views_copies_and_files_keep_their_values(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        import io
        x = torch.arange(12.0).reshape(3, 4).to("npu:0")
        x.t()[1].mul_(10)  # a view shares its memory
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        loaded = torch.load(file)["x"]
        answer(values=x.cpu().tolist(), moved=str(x.to("npu:1").device), half=x.half().dtype == torch.float16,
               made=str(torch.arange(3, device="npu:1")[None].device),
               loaded=str(loaded.device), same=torch.equal(loaded.cpu(), x.cpu()),
               pinned=torch.ones(1).pin_memory().is_pinned(),
               shape=list(x.view(2, 6).permute(1, 0).contiguous().shape), nonzero=int((x > 5).sum()))
        """
    )
    assert answers["values"] == [[0, 10, 2, 3], [4, 50, 6, 7], [8, 90, 10, 11]]
    assert (answers["moved"], answers["made"], answers["loaded"]) == ("npu:1", "npu:1", "npu:0")
    assert answers["half"] and answers["same"] and answers["pinned"]
    assert answers["shape"] == [6, 2]
    assert answers["nonzero"] == 8


def test_each_device_has_a_generator_of_its_own(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        def draw(index): return torch.randn(4, device=f"npu:{index}").cpu()
        torch.manual_seed(42)
        first, second = draw(0), draw(1)
        npu.set_device(1)
        npu.manual_seed(7)          # the current device only
        on_one, on_zero = draw(1), draw(0)
        torch.manual_seed(42)
        again = draw(0)
        answer(seeded_alike=torch.equal(first, second), repeats=torch.equal(first, again),
               one_changed=not torch.equal(on_one, first), zero_went_on=not torch.equal(on_zero, first))
        """
    )
    assert all(answers.values()), answers


def test_autocast_streams_and_events(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        layer, x = torch.nn.Linear(4, 4).to("npu"), torch.ones(2, 4, device="npu")
        with torch.autocast("npu", dtype=torch.bfloat16):
            inside = layer(x).dtype
        stream = torch.Stream("npu:1")
        start, end = (torch.Event("npu", enable_timing=True) for _ in range(2))
        start.record(); end.record()
        stream.synchronize(); npu.synchronize(1)
        answer(inside=str(inside), outside=str(layer(x).dtype), elapsed=start.elapsed_time(end),
               streams=npu.counter("synchronized_streams"), devices=npu.counter("synchronized_devices"))
        """
    )
    assert (answers["inside"], answers["outside"]) == ("torch.bfloat16", "torch.float32")
    assert isinstance(answers["elapsed"], float) and answers["elapsed"] >= 0
    assert (answers["streams"], answers["devices"]) == (1, 1)


# --- our layer above it --------------------------------------------------------------------------------------------


def test_memory_says_what_the_allocator_says(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        import dataclasses
        from anytorch.devices.memory import cleanup, memory, synchronize
        before = dataclasses.asdict(memory("npu:1"))
        asleep = not npu.is_initialized()
        x = torch.empty(3 << 20, dtype=torch.uint8, device="npu:1")
        held = dataclasses.asdict(memory(x.device))
        del x
        freed = dataclasses.asdict(memory("npu:1"))
        cleanup("npu:1")
        cleaned = dataclasses.asdict(memory("npu:1"))
        synchronize("npu:1")
        answer(before=before, asleep=asleep, held=held, freed=freed, cleaned=cleaned,
               emptied=npu.counter("emptied_caches"), synchronized=npu.counter("synchronized_devices"))
        """,
        capacity=64 * MIB,
    )
    assert answers["asleep"], "asking for memory woke the device"
    assert answers["before"]["allocated"] in (0, None)
    held, freed, cleaned = answers["held"], answers["freed"], answers["cleaned"]
    assert (held["allocated"], held["reserved"], held["peak"]) == (3 * MIB, 4 * MIB, 3 * MIB)
    assert (held["free"], held["total"]) == (60 * MIB, 64 * MIB)
    assert (freed["allocated"], freed["reserved"]) == (0, 4 * MIB)
    assert (cleaned["reserved"], cleaned["free"]) == (0, 64 * MIB)
    assert (answers["emptied"], answers["synchronized"]) == (1, 1)


def test_seed_reaches_both_devices(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        from anytorch.devices.seeds import seed
        def draw(): return [torch.randn(4, device=f"npu:{i}").cpu() for i in range(2)]
        seed(42); first = draw()
        other = draw()
        seed(42); again = draw()
        answer(same=[torch.equal(a, b) for a, b in zip(first, again)],
               moved_on=[not torch.equal(a, b) for a, b in zip(first, other)])
        """
    )
    assert answers == {"same": [True, True], "moved_on": [True, True]}


def test_out_of_memory_is_recognised_and_the_batch_halved(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        from anytorch.devices.oom import fit_batch, is_out_of_memory
        def error(call):
            try:
                call()
            except Exception as exc:
                return exc
        full = error(lambda: torch.empty(11 << 20, dtype=torch.uint8, device="npu:0"))
        ordinal = error(lambda: torch.empty(1, device="npu:2"))
        tried = []
        def work(batch):
            tried.append(batch)
            return torch.ones(batch, 1 << 20, dtype=torch.uint8, device="npu:0").sum(dtype=torch.int32).item()
        fit = fit_batch(work, 64, key="native test")
        first = list(tried)
        tried.clear()
        fit_batch(work, 64, key="native test")
        answer(type=type(full).__name__, full=is_out_of_memory(full), ordinal=is_out_of_memory(ordinal),
               batch=fit.batch, result=fit.result, too_large=fit.too_large, first=first, second=tried)
        """,
        capacity=10 * MIB,
    )
    assert (answers["type"], answers["full"], answers["ordinal"]) == ("OutOfMemoryError", True, False)
    assert answers["first"] == [64, 32, 16, 8]
    assert (answers["batch"], answers["result"], answers["too_large"]) == (8, 8 * MIB, [64, 32, 16])
    assert answers["second"] == [8], "the size that fitted was not remembered"


@pytest.mark.long
def test_it_is_chosen_when_this_process_has_loaded_it(npu_extension: Any) -> None:
    """The child cannot see a device that somebody registered here by hand; this process is asked directly."""
    answers = npu_extension.run(
        """
        from anytorch.devices.choose import best_device, devices, resolve
        listed = [c for c in devices() if c.backend == "npu"]
        asleep = not npu.is_initialized()
        torch.ones(1, device="npu:0")
        awake = [c.total for c in devices() if c.backend == "npu"]
        answer(asleep=asleep, awake=awake,
               best=str(best_device()), second=str(resolve("npu:1").device), alias=str(resolve("Ascend").device),
               ids=[c.id for c in listed], states=[c.state.value for c in listed], totals=[c.total for c in listed],
               names=[c.name for c in listed])
        """,
        capacity=64 * MIB,
    )
    assert (answers["best"], answers["second"], answers["alias"]) == ("npu:0", "npu:1", "npu:0")
    assert answers["ids"] == ["npu:0", "npu:1"]
    assert answers["states"] == ["usable", "usable"]
    assert answers["asleep"], "listing the devices woke them"
    assert answers["totals"] == [None, None], "nobody can know it before the device is woken"
    assert answers["awake"] == [64 * MIB, 64 * MIB]
    assert answers["names"] == ["test device posing as npu"] * 2


def test_an_index_beyond_the_devices_is_bad_input(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        from anytorch.devices.choose import resolve
        from anytorch.errors import DeviceIndexError
        try:
            resolve("npu:2")
        except DeviceIndexError as exc:
            answer(message=exc.message)
        """
    )
    assert "npu" in answers["message"]


def test_the_child_tries_a_device_that_torch_autoloads(npu_extension: Any, run_script: Any, tmp_path: Path) -> None:
    """The whole way: a plug-in of torch, found as such, tried in the child, chosen; this process imports no torch."""
    plugin = npu_extension.plugin(tmp_path / "plugin", capacity=64 * MIB)
    answers = run_script(
        """
        import sys
        from anytorch.devices.choose import devices, resolve
        chosen = resolve("auto")
        found = [[c.id, c.state.value, c.name, c.total] for c in devices() if c.backend == "npu"]
        answer(chosen=chosen.name, found=found, torch_loaded="torch" in sys.modules)
        """,
        path=[plugin],
        timeout_s=300,
    )
    assert answers["chosen"] == "npu:0"
    assert answers["found"] == [[f"npu:{index}", "usable", "test device posing as npu", 64 * MIB] for index in range(2)]
    assert not answers["torch_loaded"]


def test_the_documented_names(npu_extension: Any) -> None:
    """Keys and answers as the documentation of the NPU back end prints them for a machine with two NPUs."""
    answers = npu_extension.run(
        """
        import anytorch
        from anytorch_compat.backend import get_device_manager
        from anytorch_compat.system import *
        kept = torch.empty(3 << 20, dtype=torch.uint8, device="npu:0")
        manager = get_device_manager()
        answer(
            preferred=str(get_device(prefer_npu=True)),
            forced=str(get_device(force_cpu=True)),
            best=get_best_device(),
            manager_best=str(manager.get_best_device(prefer_npu=True)),
            available=is_npu_available(),
            cuda=is_cuda_available(),
            kind=get_accelerator_type(),
            info=get_device_info(),
            memory=get_memory_info(),
            devices=[str(device) for device in manager.get_all_devices()],
            summary=manager.get_device_summary(),
        )
        """,
        capacity=64 * MIB,
    )
    assert (answers["preferred"], answers["forced"], answers["manager_best"]) == ("npu:0", "cpu", "npu:0")
    assert (answers["best"], answers["kind"]) == ("npu", "npu")
    assert (answers["available"], answers["cuda"]) == (True, False)
    info = answers["info"]
    assert (info["npu_available"], info["cuda_available"], info["device_count"]) == (True, False, 2)
    assert (info["device_type"], info["device_name"]) == ("npu", "test device posing as npu")
    memory = answers["memory"]["npu_memory"]
    assert set(memory) == {"npu_0", "npu_1"}
    assert memory["npu_0"]["allocated_gb"] == pytest.approx(3 / 1024, rel=1e-3)
    assert memory["npu_0"]["reserved_gb"] == pytest.approx(4 / 1024, rel=1e-3)
    assert memory["npu_0"]["max_allocated_gb"] == pytest.approx(3 / 1024, rel=1e-3)
    assert memory["npu_1"]["allocated_gb"] == 0
    assert answers["memory"]["vram"] == {}
    assert answers["devices"] == ["npu:0", "npu:1", "cpu"]
    summary = answers["summary"]
    assert (summary["total_devices"], summary["npu_devices"], summary["cuda_devices"]) == (3, 2, 0)
    assert summary["devices"]["npu:1"]["device_name"] == "test device posing as npu"


def test_a_device_backend_moves_counts_and_waits(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        import anytorch
        from anytorch_compat.backend import DeviceBackend
        backend = DeviceBackend(torch.device("npu:1"))
        before = backend.memory_allocated()
        kept = backend.to_device({"x": torch.ones(1 << 20), "names": ["a"]})
        held = [backend.memory_allocated(), backend.memory_reserved(), backend.max_memory_allocated(),
                backend.memory_allocated(0)]
        place, names = str(kept["x"].device), kept["names"]
        backend.synchronize()
        del kept
        backend.empty_cache()
        answer(before=before, held=held, place=place, names=names, device=str(backend.device), kind=backend.device_type,
               available=backend.is_available(), count=backend.device_count(), name=backend.get_device_name(),
               after=backend.memory_reserved(), synchronized=npu.counter("synchronized_devices"),
               emptied=npu.counter("emptied_caches"))
        """
    )
    assert answers["before"] == 0
    assert answers["held"] == [4 * MIB, 4 * MIB, 4 * MIB, 0]
    assert (answers["place"], answers["names"]) == ("npu:1", ["a"])
    assert (answers["device"], answers["kind"]) == ("npu:1", "npu")
    assert (answers["available"], answers["count"], answers["name"]) == (True, 2, "test device posing as npu")
    assert (answers["after"], answers["synchronized"], answers["emptied"]) == (0, 1, 1)


def test_autocast_uses_the_dtype_that_is_fast_there(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        import anytorch
        layer, x = torch.nn.Linear(4, 4).to("npu:0"), torch.ones(2, 4, device="npu:0")
        with anytorch.autocast("npu:0"):
            inside = str(layer(x).dtype)
        answer(inside=inside, outside=str(layer(x).dtype))
        """
    )
    assert answers == {"inside": "torch.bfloat16", "outside": "torch.float32"}


def test_a_machine_whose_driver_counts_no_device_falls_back(npu_extension: Any) -> None:
    answers = npu_extension.run(
        """
        import warnings
        from anytorch.devices.choose import resolve
        from anytorch.errors import DeviceFallbackWarning
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resolution = resolve("npu")
        answer(name=resolution.name, fell_back=resolution.fell_back,
               warned=[str(w.message) for w in caught if issubclass(w.category, DeviceFallbackWarning)])
        """,
        count=0,
    )
    assert (answers["name"], answers["fell_back"]) == ("cpu", True)
    assert len(answers["warned"]) == 1 and "'npu' cannot be used" in answers["warned"][0]
