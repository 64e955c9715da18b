"""What ranks run for the tests of `fully_shard` on models of transformers: beside the naive form."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import wholestep as ws
from tests.support.fully_shard_ranks import drawn
from tests.support.parallel_ranks import naive_gradients
from wholestep import comm
from wholestep.parallel import fully_shard


def transformers_models() -> dict[str, float]:
    """The largest difference from the naive form: tied embeddings, checkpointed layers, a model of two stacks."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    bert = BertConfig(**small, vocab_size=61, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    llama = LlamaConfig(**small, vocab_size=61, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False)
    t5 = T5Config(d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, vocab_size=61, dropout_rate=0,
                  decoder_start_token_id=0)  # fmt: skip
    made = [BertForMaskedLM(bert), LlamaForCausalLM(llama), T5ForConditionalGeneration(t5)]
    found = {}
    for naive in made:
        models = shard_layers(copy.deepcopy(drawn(naive.double()))), naive
        if isinstance(naive, LlamaForCausalLM):
            models[0].gradient_checkpointing_enable()
        opts, seen = [torch.optim.AdamW(one.parameters(), 0.01) for one in models], []
        for iteration in range(2):
            random = torch.Generator().manual_seed(10 * iteration + comm.get_rank())
            ids = torch.randint(61, (2, 8), generator=random)
            for model, opt in zip(models, opts, strict=True):
                loss = model.train()(input_ids=ids, labels=ids).loss
                loss.backward()
                if model is naive:
                    naive_gradients(naive)
                seen += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
                opt.step()
                opt.zero_grad()
        name = type(naive).__name__
        found[name] = max(abs(a - b) for a, b in zip([*seen[:2], *seen[4:6]], [*seen[2:4], *seen[6:]], strict=True))
        whole = ws.full_state_dict(models[0])
        found[name] += max(float((one - whole[key]).abs().max()) for key, one in naive.state_dict().items())
    return found


def shard_layers(model: nn.Module) -> nn.Module:
    layers = [one for module in model.modules() if isinstance(module, nn.ModuleList) for one in module]
    for layer in [one for one in layers if isinstance(one, GradientCheckpointingLayer)]:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model)
