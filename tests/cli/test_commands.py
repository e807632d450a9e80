"""Each command: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch import settings
from anytorch.cache import Store
from anytorch.cli.commands import demo, reset
from anytorch.errors import WrongAnswer

SOURCES = Path(__file__).parents[2] / "src"


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_wrong_and_ends_with_1(nvml_stub: Any, process: Callable[..., Any]) -> None:
    answer = process("--json", "doctor", "--no-probe", env=nvml_stub.env())
    assert answer.status == 1
    findings = answer.document["findings"]
    assert findings[0]["code"] == "cpu-only-wheel" and findings[0]["fix"]
    levels = [finding["level"] for finding in findings]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert answer.document["torch"]["advice"]["kind"] == "cuda"
    words = process("doctor", "--no-probe", env=nvml_stub.env())
    assert words.status == 1
    assert "error: " in words.out and "fix" in words.out and "anytorch doctor cpu-only-wheel" in words.out


def test_doctor_status_follows_errors_and_warnings_not_notes(cli: Callable[..., Any]) -> None:
    answer = cli("--json", "doctor", "--no-probe")
    levels = {finding["level"] for finding in answer.document["findings"]}
    assert answer.document["wrong"] is bool(levels & {"error", "warning"})
    assert answer.status == int(answer.document["wrong"])
    words = cli("doctor", "--no-probe")
    assert ("no problem found" in words.out) is (words.status == 0)


def test_doctor_names_the_compiler(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANYTORCH_CXX", "")
    here = cli("--json", "doctor", "--no-probe").document["native"]
    assert here["carried"] is None and here["compiler"] and not here["package"]
    assert f"compiled on first use by {here['compiler']}" in cli("doctor", "--no-probe").out
    monkeypatch.setenv("ANYTORCH_CXX", "/no/such/compiler")
    without = cli("doctor", "--no-probe").out
    assert "C++ kernels: none" in without and "anytorch[compiler]" in without
    monkeypatch.setenv("ANYTORCH_CXX", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("anytorch.native.compiler.packaged_zig", lambda: tmp_path)
    assert "of the package ziglang" in cli("doctor", "--no-probe").out


def test_doctor_with_the_child(cli: Callable[..., Any]) -> None:
    document = cli("--json", "doctor").document
    assert document["tried"] is True and "cpu" in document["usable"]


def test_doctor_explains_a_code(cli: Callable[..., Any]) -> None:
    answer = cli("doctor", "cpu-only-wheel")
    assert answer.status == 0 and answer.out.startswith("# ") and "## What helps" in answer.out
    assert cli("--json", "doctor", "cpu-only-wheel").document["page"].strip() == answer.out.strip()


def test_doctor_survives_a_broken_plugin(broken_torch_plugin: Path, process: Callable[..., Any]) -> None:
    env = {"PYTHONPATH": f"{broken_torch_plugin}{os.pathsep}{SOURCES}"}
    answer = process("--json", "doctor", env=env)
    assert answer.status == 1
    assert answer.document["torch"]["autoload_error"]
    assert "cpu" in answer.document["usable"], "without the plug-in the CPU works"


# --- test -----------------------------------------------------------------------------------------------------------


def test_test_cpu_does_real_work(cli: Callable[..., Any]) -> None:
    answer = cli("--json", "test", "cpu")
    assert answer.status == 0
    (device,) = answer.document["devices"]
    assert device["result"] == "passed"
    assert [check["name"] for check in device["checks"]] == ["allocate", "copy", "matmul", "backward"]
    assert 0 < device["checks"][2]["error"] < 5e-3


def test_test_all_lists_what_is_not_here_and_passes(cli: Callable[..., Any]) -> None:
    answer = cli("test")
    assert answer.status == 0
    assert re.search(r"cpu +backward +passed", answer.out)
    assert "cuda: not here; " in answer.out
    assert cli("--json", "info", "--probe").document["probe"]["cached"] is True, "what `test` found is remembered"


def test_a_missing_device_is_status_1_with_the_reason(nvml_stub: Any, process: Callable[..., Any]) -> None:
    answer = process("--json", "test", "cuda", env=nvml_stub.env())
    assert answer.status == 1
    assert [device["result"] for device in answer.document["devices"]] == ["not here", "not here"]
    assert answer.document["reasons"][0]["code"] == "cpu-only-wheel"
    assert "built without CUDA" in answer.document["devices"][0]["error"]


def test_a_named_device_is_told_about_alone_and_in_the_words_of_resolve(
    nvml_stub: Any, process: Callable[..., Any], cli: Callable[..., Any], cpu_wheel: None
) -> None:
    import anytorch
    from anytorch.errors import DeviceUnavailable

    answer = cli("test", "mps")
    assert answer.status == 1
    with pytest.raises(DeviceUnavailable) as caught:
        anytorch.resolve("mps", strict=True)
    why = caught.value.message.partition("cannot be used: ")[2]
    assert answer.out == f"  mps: not here; {why}\n"
    document = cli("--json", "test", "cuda").document
    assert [backend["name"] for backend in document["absent"]] == ["cuda"], "rocm was not named"
    seen = process("test", "cuda", env=nvml_stub.env())
    assert seen.status == 1 and "rocm" not in seen.out
    assert seen.out.count("[cpu-only-wheel]") == 1, "one reason is told once"


def failing_torch_backend(folder: Path) -> Path:
    """A third-party back end whose device is there and raises as soon as it is used."""
    (folder / "odd-1.0.dist-info").mkdir(parents=True)
    (folder / "odd-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (folder / "odd-1.0.dist-info" / "entry_points.txt").write_text("[anytorch.backends]\nodd = odd_backend:Odd\n")
    (folder / "odd_backend.py").write_text(
        "from anytorch.devices.base import TorchBackend\n"
        "class Odd(TorchBackend):\n"
        "    name, torch_type, title = 'odd', 'odd', 'Odd device'\n"
        "    def try_out(self):\n"
        "        raise RuntimeError('the first line\\nthe second line')\n"
    )
    return folder


def test_a_failure_keeps_its_message_and_traceback(tmp_path: Path, process: Callable[..., Any]) -> None:
    env = {"PYTHONPATH": f"{failing_torch_backend(tmp_path / 'odd')}{os.pathsep}{SOURCES}"}
    document = process("--json", "doctor", env=env).document
    finding = next(f for f in document["findings"] if f["code"] == "backend-failed")
    assert "the second line" in finding["evidence"] and "Traceback (most recent call last)" in finding["evidence"]
    short = process("doctor", env=env).out
    assert "the first line (--verbose shows all)" in short and "Traceback" not in short
    assert "Traceback (most recent call last)" in process("-v", "doctor", env=env).out


def test_an_index_that_does_not_exist_is_status_2(cli: Callable[..., Any]) -> None:
    answer = cli("test", "cpu:3")
    assert answer.status == 2 and "available: cpu" in answer.err


def test_no_time_is_a_failure_not_a_hang(cli: Callable[..., Any]) -> None:
    answer = cli("--json", "test", "cpu", "--timeout", "0.01")
    assert answer.status == 1
    assert answer.document["devices"][0]["result"] == "failed"
    assert "no answer within" in answer.document["devices"][0]["error"]


# --- set, reset, config ---------------------------------------------------------------------------------------------


def test_set_stores_and_keeps_the_rest(settings_file: Path, cli: Callable[..., Any]) -> None:
    settings_file.write_text('[settings]\nthreads = 3\ndevice_uuid = "GPU-0"\n\n[tuned.cpu]\nbatch_size = 8\n')
    assert cli("set", "CPU").status == 0
    stored = settings.read_settings_file()
    assert stored == {"settings": {"threads": 3, "backend": "cpu"}, "tuned": {"cpu": {"batch_size": 8}}}
    assert cli("--json", "set", "auto").document["backend"] == "auto"


def test_set_of_a_missing_device_warns_and_stores(cli: Callable[..., Any], settings_file: Path) -> None:
    answer = cli("--json", "set", "mps")
    assert answer.status == 0
    assert answer.document["backend"] == "mps" and answer.document["usable"] is False
    assert "warning: mps cannot be used here now" in answer.err
    assert settings.read_settings_file()["settings"] == {"backend": "mps"}


@pytest.mark.parametrize(("word", "stored"), [("metal", "mps"), ("Ascend", "npu"), ("hip", "rocm"), ("host", "cpu")])
def test_set_stores_the_back_ends_own_name(
    word: str, stored: str, cli: Callable[..., Any], settings_file: Path
) -> None:
    answer = cli("--json", "set", word)
    assert answer.status == 0 and answer.document["backend"] == stored
    assert settings.read_settings_file()["settings"] == {"backend": stored}


def test_set_stores_the_uuid_not_the_index(nvml_stub: Any, process: Callable[..., Any], settings_file: Path) -> None:
    env = nvml_stub.env()
    answer = process("--json", "set", "cuda:1", env=env)
    assert answer.status == 0, answer.err
    assert answer.document["device_uuid"] == nvml_stub.second_h200.uuid
    assert settings.read_settings_file()["settings"] == {"backend": "cuda", "device_uuid": nvml_stub.second_h200.uuid}
    assert process("--json", "set", nvml_stub.h200.uuid[:12], env=env).document["device_uuid"] == nvml_stub.h200.uuid
    unknown = process("set", "GPU-ffffffff", env=env)
    assert unknown.status == 2 and "GPU-ffffffff" in unknown.err


def test_set_cpu_index(cli: Callable[..., Any], settings_file: Path) -> None:
    assert cli("set", "cpu:7").status == 2
    assert not settings_file.exists()


def test_set_says_when_the_environment_goes_first(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YIRAGE_BACKEND", "cpu")
    assert "YIRAGE_BACKEND" in cli("set", "auto").err


def test_reset_keeps_a_copy_each_time(settings_file: Path, cli: Callable[..., Any]) -> None:
    for number, damage in enumerate((b"broken = ", b"[settings]\n")):
        settings_file.write_bytes(damage)
        kept = Path(cli("--json", "reset").document["settings_kept_as"])
        assert kept.name == f"{settings_file.name}.bak{number or ''}" and kept.read_bytes() == damage
        assert not settings_file.exists()
    answer = cli("reset")
    assert (answer.status, answer.out) == (0, "there was nothing to remove\n")


def test_reset_cache_and_all(settings_file: Path, cache_file: Path, cli: Callable[..., Any]) -> None:
    settings_file.write_text("[settings]\n")
    cache_file.write_bytes(b"{damaged")
    (cache_file.parent / "somebody-elses.json").write_text("{}")
    assert cli("reset", "--cache").status == 0
    assert not cache_file.exists() and settings_file.exists()
    assert (cache_file.parent / "somebody-elses.json").exists()
    cache_file.write_bytes(b"{damaged")
    assert cli("reset", "--all").status == 0
    assert not cache_file.exists() and not settings_file.exists()


def test_reset_of_a_cache_that_is_a_folder(cache_file: Path, cli: Callable[..., Any]) -> None:
    cache_file.mkdir()
    answer = cli("reset", "--cache")
    assert answer.status == 2 and "remove it by hand" in answer.err


def test_what_was_measured_is_shown_and_forgotten(cli: Callable[..., Any]) -> None:
    from anytorch.measured import store
    from anytorch.measured.verdict import Question, Trial, Verdict

    assert "nothing has been measured" in cli("optimize", "--show").out
    assert cli("--json", "optimize", "--show").document == {"measured": []}
    trials = (Trial("plain", 0.002), Trial("quick", 0.001), Trial("odd", refused="wrong: off by 1"))
    store.remember(Verdict(Question.of("kind", "a case", "cpu"), trials, "quick", "1 ms; next is plain, 2 ms"))
    shown = cli("optimize", "--show").out
    assert (
        "kind, a case, on cpu: quick (1 ms; next is plain, 2 ms" in shown
        and "odd    not used: wrong: off by 1" in shown
    )
    (document,) = cli("--json", "optimize", "--show").document["measured"]
    assert document["chosen"] == "quick" and [one["name"] for one in document["trials"]] == ["plain", "quick", "odd"]
    assert str(store.folder()) in cli("reset", "--cache").out
    assert not store.folder().exists() and not list(store.verdicts())


def test_reset_removes_what_earlier_versions_wrote(cache_file: Path, cli: Callable[..., Any]) -> None:
    """A store that no code of ours reads any more is not somebody else's file."""
    old = cache_file.parent / "batches.json"
    old.write_text('{"model on device": 12}')
    assert str(old) in cli("reset", "--cache").out and not old.exists()


def test_reset_knows_every_store() -> None:
    named: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named.update(re.findall(r"\bStore\(\"([a-z-]+)\"", text))
        for constant in set(re.findall(r"\bStore\((_?[a-zA-Z_]+)\)", text)):  # and CACHE = "…" above it
            named.update(re.findall(rf"^{constant} = \"([a-z-]+)\"", text, re.M))
    assert named and named <= set(reset.STORES)
    assert Store("x").path.suffix == ".json"


def test_config_show_path_save_load(
    settings_file: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_file.write_text('[settings]\nthreads = 3\n\n[tuned.cpu]\nbatch_size = 8\nkey = "abc"\n')
    assert cli("config", "path").out.strip() == str(settings_file)
    shown = cli("--json", "config", "show").document
    assert shown["settings"]["threads"]["value"] == 3 and shown["settings"]["threads"]["source"] == "file"
    assert shown["tuned"]["cpu"]["batch_size"] == 8
    text = cli("config").out
    assert "threads" in text and "tuned for cpu" in text and "ANYTORCH_THREADS" in text
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    for name in ("mine.toml", "mine.json"):
        monkeypatch.setenv("ANYTORCH_STRICT", "1")
        assert cli("config", "save", str(tmp_path / name)).status == 0
        monkeypatch.delenv("ANYTORCH_STRICT")
        settings_file.unlink()
        assert cli("config", "load", str(tmp_path / name)).status == 0
        stored = settings.read_settings_file()
        assert stored["settings"] == {"strict": True, "threads": 3}
        assert stored["tuned"] == {"cpu": {"batch_size": 8, "key": "abc"}}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", "settings.thread = 3\n", "did you mean 'threads'"),
        ("a.toml", "settings.threads = 0\n", "threads"),
        ("a.toml", "not toml", "not valid TOML"),
        ("a.toml", "[extra]\n", "unknown table 'extra'"),
        ("a.toml", 'settings.cache_dir = "/x"\n', "cannot be set in a file"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[]", "not a settings file"),
        ("a.toml", None, "there is no file"),
    ],
)
def test_config_load_refuses_nonsense_and_changes_nothing(
    name: str, content: str | None, said: str, settings_file: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    settings_file.write_text("[settings]\nthreads = 3\n")
    if content is not None:
        (tmp_path / name).write_text(content)
    answer = cli("config", "load", str(tmp_path / name))
    assert answer.status == 2 and said in answer.err
    assert settings_file.read_text() == "[settings]\nthreads = 3\n"


def test_config_save_and_load_need_a_file(cli: Callable[..., Any], tmp_path: Path) -> None:
    assert cli("config", "save").status == 2
    assert cli("config", "load").status == 2
    assert cli("config", "path", "x").status == 2
    assert cli("config", "save", str(tmp_path)).status == 2  # a folder


# --- demo -----------------------------------------------------------------------------------------------------------


def test_demo_trains_on_every_usable_device(cli: Callable[..., Any], tried: None, shared_libraries: Path) -> None:
    answer = cli("demo", "--skip-jobs", "--backend", "all", "--iterations", "6")
    assert answer.status == 0, answer.err
    for words in ("devices", "learning to sort digits", "cpu", "agree with fp64", "what next", "anytorch doctor"):
        assert words in answer.out
    assert "the persistent kernel (" in answer.out and "both wrote the same" in answer.out
    told = cli("--json", "demo", "--skip-jobs", "--backend", "cpu", "--iterations", "30", "--skip-persistent")
    assert told.err == ""
    (result,) = told.document["results"]
    assert result["last_loss"] < result["first_loss"] and result["iterations"] == 30
    assert 0 <= result["difference"] < 1e-4
    assert result["accuracy"] > 0.2, "chance is 0.1"


def test_demo_shows_a_search_a_forecast_and_a_sentence(cli: Callable[..., Any], shared_libraries: Path) -> None:
    pytest.importorskip("transformers")
    jobs = cli("--json", "demo", "--backend", "cpu", "--iterations", "1", "--skip-persistent").document["jobs"]
    assert [one["error"] for one in jobs.values()] == ["", "", ""]
    assert "memory" in jobs["embed"]["hits"][0]["text"], "the text about a small graphics card"
    bars = jobs["forecast"]["bars"]
    assert len(bars) == 6 and all(bar["low"] <= bar["close"] <= bar["high"] for bar in bars)
    assert jobs["generate"]["text"] == "Remove any common leading whitespace from every line in `text`."


def test_a_job_whose_packages_are_missing_says_what_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from anytorch.cli import demo_jobs
    from anytorch.cli.output import Output

    def without(package: str) -> Callable[..., Any]:
        def job(output: Any) -> Any:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)

        return job

    for name, package in (("search", "tokenizers"), ("forecast", "pandas"), ("sentence", "transformers")):
        monkeypatch.setattr(demo_jobs, name, without(package))
    document = demo_jobs.show(Output())
    told = capsys.readouterr().out
    for extra, package in (("embed", "tokenizers"), ("forecast", "pandas"), ("generate", "transformers")):
        assert package in document[extra]["error"] and f"anytorch[{extra}]" in document[extra]["hint"]
        assert document[extra]["hint"] in told and not document[extra]["failed"]
    monkeypatch.setattr(demo_jobs, "search", without("a_bug_of_ours"))
    with pytest.raises(ModuleNotFoundError):
        demo_jobs.show(Output())


def test_demo_does_not_time_a_kernel_that_writes_other_tokens(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shared_libraries: Path
) -> None:
    from anytorch.text.persistent.kernel import PersistentKernel

    right = PersistentKernel.generate
    monkeypatch.setattr(PersistentKernel, "generate", lambda *a, **k: [(t + 1) % 2048 for t in right(*a, **k)])
    answer = cli("--json", "demo", "--skip-jobs", "--backend", "cpu", "--iterations", "1")
    told = answer.document["jobs"]["persistent"]
    assert "differ at token 0" in told["error"] and "kernel_s" not in told
    assert told["failed"] and answer.status == 1


def test_demo_falls_back_and_says_so(cli: Callable[..., Any]) -> None:
    answer = cli("--json", "demo", "--skip-jobs", "--backend", "mps", "--iterations", "1", "--skip-persistent")
    assert answer.status == 0
    assert answer.document["results"][0]["device"] == "cpu"
    assert "'mps' cannot be used" in answer.document["warnings"][0]
    assert answer.err.startswith("warning: device 'mps'")


def test_demo_would_use_the_configured_device(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, cpu_wheel: None
) -> None:
    monkeypatch.setenv("ANYTORCH_BACKEND", "mps")
    answer = cli("demo", "--skip-jobs", "--backend", "cpu", "--iterations", "1", "--skip-persistent")
    assert answer.status == 0
    assert "  would use: cpu; mps (from ANYTORCH_BACKEND) cannot be used: no Apple GPU (MPS)" in answer.out


def test_demo_is_the_same_every_time_and_leaves_the_generator_alone() -> None:
    import torch

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, second = demo.reference(), demo.reference()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_demo_does_not_time_a_wrong_answer(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo.reference

    def off() -> dict[str, Any]:
        found = right()
        return {**found, "head.bias": found["head.bias"] * 1.5}

    monkeypatch.setattr(demo, "reference", off)
    with pytest.raises(WrongAnswer, match=r"head\.bias"):
        demo.agreement("cpu", off())
    answer = cli("--json", "demo", "--skip-jobs", "--backend", "cpu", "--iterations", "1", "--skip-persistent")
    assert answer.status == 1
    assert "median_ms" not in answer.document["results"][0]
    assert "head.bias" in answer.document["results"][0]["error"]


def test_demo_keeps_going_when_one_device_fails(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = demo.to_run("cpu", demo.survey("needed"))
    monkeypatch.setattr(demo, "to_run", lambda request, survey: [*found, *found])
    calls: list[str] = []
    train = demo.train

    def sometimes(device: str, *rest: Any) -> Any:
        calls.append(device)
        if len(calls) == 1:
            # torch 2.13.0+cpu, torch.ones(1, device="cuda")
            raise AssertionError("Torch not compiled with CUDA enabled")
        return train(device, *rest)

    monkeypatch.setattr(demo, "train", sometimes)
    answer = cli("--json", "demo", "--skip-jobs", "--iterations", "1", "--skip-persistent")
    assert answer.status == 1
    assert [bool(result["error"]) for result in answer.document["results"]] == [True, False]


# --- benchmark and optimize -----------------------------------------------------------------------------------------


def test_benchmark_writes_report_and_picture(tmp_path: Path, cli: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "results.json", tmp_path / "rates.svg"
    answer = cli(
        *("--json", "benchmark", "--backend", "cpu", "--duration", "0.3", "--workloads", "matmul", "bandwidth"),
        *("--dtype", "float32", "--output", str(report), "--plot", str(picture)),
    )
    assert answer.status == 0, answer.err
    assert answer.document["devices"][0]["id"] == "cpu"
    assert json.loads(report.read_text()) == answer.document
    assert picture.read_text().lstrip().startswith("<?xml")
    assert str(report) in answer.err and str(picture) in answer.err


def test_benchmark_takes_the_documented_sizes(cli: Callable[..., Any]) -> None:
    answer = cli(
        *(
            "benchmark",
            "--backend",
            "cpu",
            "--iterations",
            "2",
            "--workloads",
            "transformer",
            "--batch-sizes",
            "1",
            "2",
        ),
        *("--seq-lengths", "16", "--hidden-sizes", "32", "--dtype", "float32"),
    )
    assert answer.status == 0, answer.err
    assert len(re.findall(r"^transformer ", answer.out, re.M)) == 2
    assert "checked before the clock" in answer.out


def test_a_single_run_has_no_spread_and_skipped_rows_say_why(cli: Callable[..., Any]) -> None:
    answer = cli(*("benchmark", "--backend", "cpu", "--iterations", "1", "--workloads", "bandwidth", "copies"))
    assert answer.status == 0, answer.err
    rows = re.findall(r"^bandwidth .*", answer.out, re.M)
    assert rows and all("one run" in row for row in rows) and "±0%" not in answer.out
    assert "cpu: 4 rows skipped: this device shares the host's memory" in answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--duration", "0"],
        ["--duration", "soon"],
        ["--iterations", "0"],
        ["--batch-sizes", "0"],
        ["--dtype", "float99"],
        ["--workloads", "juggling"],
        ["--backend", "cdua"],
        ["--backend", "cpu:9"],
    ],
)
def test_benchmark_refuses_nonsense(arguments: list[str], cli: Callable[..., Any]) -> None:
    answer = cli("benchmark", *arguments)
    assert answer.status == 2 and answer.err.startswith("error: "), answer


def test_optimize_prints_and_applies(settings_file: Path, cli: Callable[..., Any]) -> None:
    answer = cli("--json", "optimize", "--backend", "cpu", "--duration", "0.5")
    assert answer.status == 0, answer.err
    assert answer.document["applied"] is None and not settings_file.exists()
    assert answer.document["plan"]["device"] == "cpu" and answer.document["plan"]["items"]
    for item in answer.document["plan"]["items"]:
        assert item["default"] in [option["value"] for option in item["options"]]
        assert all(option["note"] or option["seconds"] > 0 for option in item["options"])
    applied = cli("optimize", "--backend", "cpu", "--duration", "0.5", "--apply")
    assert applied.status == 0
    assert str(settings_file) in applied.err and "batch_size" in applied.out
    assert settings.read_settings_file()["tuned"]["cpu"]["key"] == answer.document["plan"]["machine_key"]


@pytest.mark.parametrize(
    "arguments", [["optimize", "--apply", "--backend"], ["optimize", "--backend"], ["benchmark", "--backend", "cpu"]]
)
def test_nothing_is_measured_or_written_for_a_device_that_is_missing(
    arguments: list[str],
    tmp_path: Path,
    settings_file: Path,
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    cpu_wheel: None,
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr("anytorch.devices.tune.tune", measured)
    monkeypatch.setattr("anytorch.devices.bench.benchmark", measured)
    answer = cli("--json", *arguments, "mps")
    assert answer.status == 1
    assert answer.document["error"]["type"] == "DeviceUnavailable"
    assert "'mps' cannot be used: no Apple GPU (MPS)" in answer.err
    assert not settings_file.exists()


def test_a_missing_card_is_refused_with_its_reasons(
    nvml_stub: Any, process: Callable[..., Any], settings_file: Path
) -> None:
    answer = process("--json", "optimize", "--backend", "cuda", "--apply", env=nvml_stub.env())
    assert answer.status == 1
    assert answer.document["error"]["reasons"][0] == "cpu-only-wheel"
    assert "--index-url" in answer.document["error"]["hint"]
    assert not settings_file.exists()


def test_optimize_refuses_nonsense(cli: Callable[..., Any]) -> None:
    assert cli("optimize", "--duration", "-1").status == 2
    assert cli("optimize", "--backend", "cdua").status == 2
