"""What a data-parallel wrapper tells of itself: settings, buckets and times, by the names that torch's has for them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from wholestep import comm

_CPP_NAMES = {"float32": "float", "float64": "double", "bfloat16": "c10::BFloat16", "float16": "c10::Half"}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
# what took how long: from one mark of an iteration to another
_SPANS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}


class StepTimes:
    """When what happened in the last iteration, in nanoseconds since 1970, and how long things took in all of them."""

    def __init__(self) -> None:
        self.iterations = 0
        self.marks: dict[str, int] = {}
        self._totals: Counter[str] = Counter()

    def begin_iteration(self) -> None:
        """A forward begins, whose backward will reduce."""
        self.marks = {"forward_compute_time_start": time.time_ns()}

    def mark(self, name: str) -> None:
        """It happens now, if it has not happened in this iteration."""
        self.marks.setdefault(name, time.time_ns())

    def end_iteration(self) -> None:
        """Adds up what took how long."""
        self.iterations += 1
        for name, span in self._spans().items():
            self._totals[name] += span

    def _spans(self) -> dict[str, int]:
        marks = self.marks
        known = [(name, start, end) for name, (start, end) in _SPANS.items() if start in marks and end in marks]
        return {name: max(0, marks[end] - marks[start]) for name, start, end in known}

    def fields(self) -> dict[str, int]:
        """Marks and spans of the last iteration, and the spans' means over all."""
        means = {f"avg_{name}": total // self.iterations for name, total in self._totals.items()}
        return self.marks | self._spans() | means


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def logging_data(wrapper: Any) -> dict[str, Any]:
    """The fields of torch's ``_get_ddp_logging_data``, switches as 0 and 1; those of iterations once there was one."""
    reducer, group = wrapper.reducer, wrapper.process_group
    dtypes = {str(p.dtype).removeprefix("torch.") for p in reducer.parameters}
    found: dict[str, Any] = {
        "world_size": group.size(),
        "rank": group.rank(),
        "backend_name": comm.get_backend(group),
        "module_name": type(wrapper.module).__name__,
        "device_ids": _listed(one.index for one in wrapper.device_ids),
        "output_device": wrapper.device_ids[0].index if wrapper.device_ids else -1,
        "dtypes": _listed(sorted(_CPP_NAMES.get(one, one) for one in dtypes)),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
        "num_parameter_tensors": len(reducer.parameters),
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": max(reducer.limits),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
        "has_sync_bn": int(any("SyncBatchNorm" in type(one).__name__ for one in wrapper.module.modules())),
        "bucket_sizes": _listed(reducer.first_sizes),
        "iteration": reducer.times.iterations,
        **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
    }
    if reducer.hook is not None:
        found["comm_hook"] = wrapper.hook_name
    if reducer.error:
        found |= {"has_error": 1, "error": reducer.error}
    if wrapper.has_joined:
        found["join_uneven_inputs"] = 1
    if reducer.times.iterations:
        found |= reducer.times.fields() | {
            "has_rebuilt_buckets": int(reducer.rebuilt),
            "num_buckets_reduced": len(reducer.buckets),
            "unused_parameter_size": sum(reducer.parameters[i].nbytes for i in reducer.unused),
            "prev_iteration_grad_ready_order_indices": _listed(reducer.order),
        }
    if reducer.rebuilt:
        found["rebuilt_bucket_sizes"] = _listed(one.nbytes for one in reducer.buckets)
        found["rebuilt_per_bucket_param_indices"] = _listed(
            " ".join(map(str, bucket.members)) for bucket in reducer.buckets
        )
    return found
