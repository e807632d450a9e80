"""Recording: one stream for all recordings of a thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from anytorch.recorded import graphs


def test_recordings_of_a_thread_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep a workspace per stream; and two threads that record at once must not meet on one."""
    monkeypatch.setattr(graphs, "_streams", threading.local())
    made: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

    module, first, second = SimpleNamespace(Stream=Stream), torch.device("cuda", 0), torch.device("cuda", 1)
    mine = graphs.side_stream(module, first)
    assert graphs.side_stream(module, torch.device("cuda", 0)) is mine
    assert graphs.side_stream(module, second) is not mine and made == [first, second], "each on its own card"
    theirs: list[object] = []
    thread = threading.Thread(target=lambda: theirs.append(graphs.side_stream(module, first)))
    thread.start()
    thread.join()
    assert theirs != [mine] and len(theirs) == 1
