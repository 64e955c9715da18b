"""What ranks run for the tests of Accelerate and the Trainer: the same loop with their own classes and with ours."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import torch
import transformers
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch import nn

from wholestep import comm, full_state_dict
from wholestep.parallel import fully_shard
from wholestep.parallel.integrations.accelerate import Accelerator
from wholestep.parallel.integrations.transformers import Trainer


def begin(port: int) -> None:
    """The framework is to make its process group; ours joins that."""
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    comm.destroy_process_group()


def make(seed: int | None = None) -> nn.Module:
    torch.manual_seed(int(os.environ["RANK"]) if seed is None else seed)  # rank 0's values count
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def state(module: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in module.state_dict().values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Loop:
    """A loop as Accelerate's documentation has it."""

    def __init__(self, kind: Any, rows: int = 48, shards: bool = False, **settings: Any) -> None:
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=2, **settings)
        self.module = model = make(0 if shards else None)
        if shards:
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(7))
        data = torch.utils.data.TensorDataset(x, x[:, :2] ** 2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = torch.utils.data.DataLoader(data, 4)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def epoch(self) -> list[float]:
        """The mean loss over the ranks, of each batch."""
        seen = []
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.loss(x, y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            seen.append(float(self.accelerator.gather(loss.detach()).mean()))
        return seen

    def late(self) -> None:
        """Two forwards without communication, of which the second's backward reduces."""
        (x, y), (other, target) = list(self.loader)[:2]
        with self.accelerator.no_sync(self.model):
            first, second = self.loss(x, y), self.loss(other, target)
        self.accelerator.backward(first)
        with self.accelerator.trigger_sync_in_backward(self.model):
            self.accelerator.backward(second)
        self.optimizer.step()


def accelerate_checks(port: int, folder: str) -> dict[str, Any]:
    begin(port)
    found: dict[str, Any] = {}
    loops = [Loop(accelerate.Accelerator), Loop(Accelerator)]
    found["losses"] = loops[0].epoch() == loops[1].epoch()
    ours = loops[1]
    found["weights"] = equal(*(state(one.module) for one in loops))
    found["reductions"] = ours.model.reducer.times.iterations
    found["unwrapped"] = ours.accelerator.unwrap_model(ours.model) is ours.module
    ours.accelerator.save_state(folder)
    ours.epoch()
    resumed = Loop(Accelerator)
    resumed.accelerator.load_state(folder)
    resumed.epoch()
    found["resumed"] = equal(state(ours.module), state(resumed.module))
    for name, settings in (
        ("late", {}),
        ("hook", {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]}),
        ("bf16", {"mixed_precision": "bf16"}),
    ):
        accelerate.state.AcceleratorState._reset_state()
        loops = [Loop(accelerate.Accelerator, **settings), Loop(Accelerator, **settings)]
        for one in loops:
            one.late()
        found[name] = equal(*(state(one.module) for one in loops))
    accelerate.state.AcceleratorState._reset_state()
    whole, parts = Loop(Accelerator), Loop(Accelerator, shards=True)
    found["sharded"] = torch.allclose(torch.tensor(whole.epoch()), torch.tensor(parts.epoch()), atol=1e-6)
    names = [name for name, _ in parts.module.named_parameters() if name != "0.bias"]  # noise: the norm cancels it
    left = [one.accelerator.get_state_dict(one.model) for one in (whole, parts)]
    found["sharded"] &= all(torch.allclose(*(one[name] for one in left), atol=1e-6) for name in names)
    parts.accelerator.save_state(folder + "-sharded")
    parts.epoch()
    again = Loop(Accelerator, shards=True)
    again.accelerator.load_state(folder + "-sharded")
    again.epoch()
    found["sharded resumed"] = equal(*(list(one.module.parameters()) for one in (parts, again)))  # buffers: rank 0's
    accelerate.state.AcceleratorState._reset_state()
    uneven = Loop(Accelerator, rows=20)  # five batches
    with uneven.accelerator.join_uneven_inputs([uneven.model], even_batches=False):
        batches = 0
        for x, y in uneven.loader:
            uneven.loss(x, y).backward()
            batches += 1
    found["uneven"] = batches, [round(float(one.double().sum()), 9) for one in uneven.module.parameters()]
    accelerator = uneven.accelerator
    spare = accelerator.prepare(nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)}))
    spare.module.forward = spare.module["used"].forward
    mesh = patch.object(accelerator.state, "distributed_type", DistributedType.MEGATRON_LM)
    for name, call, within in (
        ("unused", lambda: [spare(torch.ones(1, 2)).sum().backward() for _ in range(2)], patch.dict({}, {})),
        ("kind", lambda: accelerator.prepare_model(nn.Linear(1, 1)), mesh),
    ):
        try:
            with within:
                call()
            found[name] = "no error"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def trained(
    kind: Any, folder: Path, resume: bool = False, shards: bool = False
) -> tuple[list[torch.Tensor], list[float], Any]:
    """Weights and the losses that were logged."""
    torch.manual_seed(0 if shards else int(os.environ["RANK"]))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes))
    ids = torch.randint(0, 50, (64, 8), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": one, "labels": int(one[0]) % 2} for one in ids]
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_grad_norm=0.1, learning_rate=1e-2, save_steps=2, logging_steps=1, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    if shards:
        fully_shard(model)
    trainer = kind(model, arguments, train_dataset=data)
    trainer.train(str(folder / "checkpoint-2") if resume else None)
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return list(full_state_dict(model).values()) if shards else state(model), losses, trainer


def trainer_checks(port: int, folder: str) -> dict[str, Any]:
    begin(port)
    transformers.logging.set_verbosity_error()
    stock, stock_losses, _ = trained(transformers.Trainer, Path(folder, "stock"))
    ours, losses, trainer = trained(Trainer, Path(folder, "ours"))
    resumed, *_ = trained(Trainer, Path(folder, "ours"), resume=True)
    wrapper = trainer.model_wrapped
    sharded, sharded_losses, parts = trained(Trainer, Path(folder, "parts"), shards=True)
    sharded_resumed, *_ = trained(Trainer, Path(folder, "parts"), resume=True, shards=True)
    saved = type(parts.model).from_pretrained(str(Path(folder, "parts", "checkpoint-4")))
    return {
        "sharded": torch.allclose(torch.tensor(losses), torch.tensor(sharded_losses), atol=1e-4),
        "sharded resumed": equal(sharded, sharded_resumed),
        "sharded saved": equal(sharded, state(saved)),
        "weights": equal(stock, ours),
        "losses": losses == stock_losses and len(losses) == 4,
        "wrapper": type(wrapper).__module__.split(".")[0],
        "reductions": wrapper.reducer.times.iterations,
        "unused allowed": wrapper.find_unused_parameters,
        "resumed": equal(ours, resumed),
    }
