"""Recording: one stream for all recordings of a thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from anytorch.models.encoders import graphs


def test_recordings_of_a_thread_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep a workspace per stream; and two threads that record at once must not meet on one."""
    monkeypatch.setattr(graphs.torch, "get_device_module", lambda device: SimpleNamespace(Stream=object))
    monkeypatch.setattr(graphs, "_streams", threading.local())
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    mine = graphs.side_stream(first)
    assert graphs.side_stream(torch.device("cuda", 0)) is mine and graphs.side_stream(second) is not mine
    theirs: list[object] = []
    thread = threading.Thread(target=lambda: theirs.append(graphs.side_stream(first)))
    thread.start()
    thread.join()
    assert theirs != [mine] and len(theirs) == 1
