"""The plug-in of examples/plugin-backend, installed by pip and used in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def ask(run_script: Callable[..., dict[str, Any]], installed_example: Path) -> Callable[..., dict[str, Any]]:
    """Run a script where the example is installed; it ends with `answer(name=value)`."""

    def run(code: str, env: dict[str, str | None] | None = None) -> dict[str, Any]:
        return run_script(code, env, path=[installed_example], warm=True)

    return run


@pytest.fixture
def command(run_python: Callable[..., Any], installed_example: Path) -> Callable[..., Any]:
    """Run `anytorch …` where the example is installed."""

    def run(*arguments: str, check: bool = True) -> Any:
        code = f"import sys; from anytorch.cli.main import main; sys.exit(main({list(arguments)!r}))"
        return run_python(code, path=[installed_example], check=check)

    return run


def test_it_is_two_files() -> None:
    folder = Path(__file__).parents[3] / "examples" / "plugin-backend"
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["counted_backend.py", "pyproject.toml"]


@pytest.mark.long
def test_resolves_by_name_and_alias(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import anytorch
        by_name, by_alias = anytorch.resolve("counted"), anytorch.resolve("Tally:0")
        answer(
            device=str(by_name.device), fell_back=by_name.fell_back, id=by_name.chosen.id, alias=by_alias.chosen.id,
            best=str(anytorch.best_device()), best_backend=anytorch.resolve("auto").chosen.backend,
            operators=by_name.chosen.facts["operators"], free=anytorch.memory("counted").allocated,
        )
        """
    )
    assert told["device"] == "cpu" and told["fell_back"] is False
    assert told["id"] == told["alias"] == "counted:0"
    assert told["best"] == "cpu" and told["best_backend"] == "cpu"  # below the CPU: nothing is chosen because of it
    assert told["operators"]["aten.mm.default"] >= 2  # counted in the child, where it was really tried
    assert told["free"] is None  # unknown is None, never 0


@pytest.mark.long
def test_documented_names_know_it(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import pickle, anytorch
        from anytorch_compat.backend import DeviceBackend, get_device_manager
        from anytorch_compat.selection import BackendType, get_available_backends, get_backend, set_backend
        from anytorch_compat.system import get_memory_info
        counted = BackendType("counted")
        listed = get_available_backends()
        chosen = set_backend("counted")
        backend = DeviceBackend("counted")
        answer(
            listed=[b.value for b in listed], same=listed[1] is counted is BackendType("TALLY") is chosen,
            pickled=pickle.loads(pickle.dumps(counted)) is counted, text=f"{counted}", equal=counted == "counted",
            ours=[b.value for b in BackendType], in_force=get_backend().value,
            available=backend.is_available(), count=backend.device_count(), device=str(backend.device),
            name=backend.get_device_name(), devices=[str(d) for d in get_device_manager().get_all_devices()],
            memory=get_memory_info()["vram"],
        )
        """
    )
    assert told["listed"] == ["cpu", "counted"]
    assert told["same"] and told["pickled"] and told["equal"] and told["text"] == "counted"
    assert "counted" not in told["ours"]
    assert told["in_force"] == "counted"
    assert told["available"] is True and told["count"] == 1 and told["device"] == "cpu"
    assert told["name"].endswith(", counted")
    assert told["devices"] == ["cpu"]  # one torch.device, however many back ends stand behind it
    assert told["memory"] == {}  # the CPU's memory is no vram under any name


def test_info_lists_it_from_files_alone(command: Callable[..., Any]) -> None:
    listed = json.loads(command("--json", "info").stdout)["devices"]
    (mine,) = [device for device in listed if device["backend"] == "counted"]
    assert mine["state"] == "seen, not tried"


def test_test_command_tries_it(command: Callable[..., Any]) -> None:
    told = json.loads(command("--json", "test", "counted").stdout)
    assert "counted" in json.dumps(told) and "matmul" in json.dumps(told)


@pytest.mark.parametrize(
    ("allowed", "loaded"), [("", False), ("something-else", False), ("counted", True), ("COUNTED, other", True)]
)
def test_allow_list(ask: Callable[..., dict[str, Any]], allowed: str, loaded: bool) -> None:
    told = ask(
        """
        import sys
        from anytorch.devices.registry import registry
        answer(names=list(registry().backends), imported="counted_backend" in sys.modules)
        """,
        {"ANYTORCH_PLUGINS": allowed},
    )
    assert ("counted" in told["names"]) is loaded
    assert told["imported"] is loaded  # one that is not admitted is not even imported
    assert "cuda" in told["names"] and "cpu" in told["names"]


def test_unknown_without_admission(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import anytorch
        from anytorch_compat.selection import set_backend
        try:
            set_backend("counted")
        except anytorch.AnytorchError as exc:
            answer(kind=type(exc).__name__, message=exc.message)
        """,
        {"ANYTORCH_PLUGINS": ""},
    )
    assert told["kind"] == "UnknownDevice" and "'counted'" in told["message"]
