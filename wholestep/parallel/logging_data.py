"""What a data-parallel wrapper tells of itself: settings and buckets, by the names that torch's has for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from wholestep import comm

_CPP_NAMES = {"float32": "float", "float64": "double", "bfloat16": "c10::BFloat16", "float16": "c10::Half"}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def logging_data(wrapper: Any) -> dict[str, Any]:
    """The fields of torch's ``_get_ddp_logging_data`` but for times, which profiles have. Switches are 0 and 1; those
    of iterations come once there was one."""
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
        "iteration": reducer.iterations,
        **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
    }
    if reducer.hook is not None:
        found["comm_hook"] = wrapper.hook_name
    if reducer.error:
        found |= {"has_error": 1, "error": reducer.error}
    if wrapper.has_joined:
        found["join_uneven_inputs"] = 1
    if reducer.iterations:
        found |= {
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
