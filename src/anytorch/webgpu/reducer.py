"""DistributedDataParallel that looks for unused parameters, on this device.

torch's reducer notes in C++ which parameters each process used, and sends the notes to the device of the first parameter by
way of page-locked memory, for which a device written in Python has no allocator. The first parameter that the reducer is
told of is therefore one of ours on the CPU that no model uses: the notes stay there, and gloo adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from anytorch.webgpu.tensors import is_ours

UNUSED = "(none: it keeps DistributedDataParallel's notes on the CPU)"


def register() -> None:
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    original, set_static = parallel._ddp_init_helper, parallel._set_static_graph

    @wraps(original)
    def prepare(
        self: Any,
        parameters: Sequence[torch.Tensor],
        sparse: Sequence[bool],
        names: Mapping[int, str],
        static_graph: bool,
    ) -> Any:
        self._needs_notes = is_ours(parameters[0])  # which it has not yet
        if self._needs_notes and (self.find_unused_parameters or static_graph):
            self._needs_notes = False
            parameters = [torch.nn.Parameter(torch.zeros(1, device="cpu")), *parameters]
            sparse = [False, *sparse]
            names = {0: UNUSED, **{index + 1: name for index, name in names.items()}}
        return original(self, parameters, sparse, names, static_graph)

    @wraps(set_static)
    def set_static_graph(self: Any) -> Any:
        """Programs call it, too, after a constructor that did not know of it: the reducer is made again."""
        if self._needs_notes and not self._comm_hooks:
            parameters, sparse = self._build_params_for_reducer()
            self._ddp_init_helper(parameters, sparse, self._build_debug_param_to_name_mapping(parameters), True)
        return set_static(self)

    parallel._ddp_init_helper, parallel._set_static_graph = prepare, set_static_graph
