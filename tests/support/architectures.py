"""Every architecture of transformers that trains from a small config: eager, and compiled by default, bit for bit.

    python -m tests.support.architectures            goes on where it stopped; results in docs/architectures.json
    python -m tests.support.architectures --table    writes docs/architectures.md from them
    python -m tests.support.architectures --one gpt2

Configs are made small by the names of their
settings, inputs by the names that a model asks for; what eager does not train so is counted apart.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import torch

import wholestep as ws
from tests.support.resumable import DOCS, results, walk

STEPS, MOST_PARAMETERS = 3, 40_000_000

# What a setting becomes, by its name; the first that matches. Twice: small in all, then in depth and vocabulary alone.
FEW = [
    (r"vocab_size$|^vocab_size", 120), (r"(pad|bos|eos|sep|cls|mask|decoder_start|unk)_token_id$", 1),
    (r"^(num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|depth|num_(en|de)coder_layers|num_blocks)$", 2),
    (r"^(num_experts|n_routed_experts|num_local_experts)$", 4), (r"^(num_experts_per_tok|moe_topk|top_k)$", 2),
    (r"^(max_position_embeddings|n_positions|max_source_positions|max_target_positions)$", 512),
]  # fmt: skip
SMALL = [
    *FEW,
    (r"^(num_key_value_heads|num_kv_heads)$", 2), (r"^(head_dim|qk_nope_head_dim|qk_rope_head_dim|v_head_dim)$", 8),
    (r"^(q_lora_rank|kv_lora_rank)$", 16), (r"^(n_group|topk_group)$", 1),
    (r"(attention_heads|num_heads|n_head|n_heads)$", 4), (r"^(image_size|input_size)$", 32), (r"^patch_size$", 8),
    (r"(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|dim_feedforward|d_inner)$", 64),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|emb_dim|^dim)$", 32),
]  # fmt: skip
TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "IMAGE_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "VIDEO_CLASSIFICATION", "TIME_SERIES_PREDICTION",
    "DEPTH_ESTIMATION", "QUESTION_ANSWERING", "PRETRAINING", "",
)  # fmt: skip


def kinds() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - seconds, and not of all

    return sorted(CONFIG_MAPPING.keys())


def smaller(config: Any, rules: list[tuple[str, int]], depth: int = 3) -> dict[str, Any]:
    """The settings that a small config has instead, those of configs inside of it as dicts."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and depth:
            found[name] = value.to_dict() | smaller(value, rules, depth - 1)
        elif type(value) is int and value > 0:
            small = next((number for pattern, number in rules if re.search(pattern, name)), value)
            if small < value or name.endswith("token_id"):
                found[name] = small
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        found["decoder_start_token_id"] = 1
    return found


def shrunk(config_class: Any, rules: list[tuple[str, int]], at_once: bool) -> Any:
    """A config with small numbers; ``at_once``: given to its class, which may derive others from them."""
    config = config_class()
    found = smaller(config, rules)
    if at_once:
        return config_class(**found)
    for name, value in found.items():
        inner = getattr(config, name)
        if isinstance(value, dict):
            for key, number in smaller(inner, rules).items():
                setattr(inner, key, number)
        else:
            setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[: getattr(config, "num_hidden_layers", 2)])
    return config


def models(kind: str) -> Iterator[Any]:
    """Models of an architecture, the likeliest to train first."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    for rules, at_once in ((SMALL, True), (SMALL, False), (FEW, True), (FEW, False)):
        for task in TASKS:
            table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING" if task else "MODEL_MAPPING", None)
            config_class = CONFIG_MAPPING[kind]
            if table is None or config_class not in table:
                continue
            try:
                found = table[config_class]
                model_class = found[0] if isinstance(found, tuple) else found
                config = shrunk(config_class, rules, at_once)
                with torch.device("meta"):
                    count = sum(p.numel() for p in model_class(config).parameters())
                if count < MOST_PARAMETERS:
                    torch.manual_seed(0)
                    yield model_class(config).train()
            except Exception as error:
                print(f"{rules is SMALL} {at_once} {task}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)


def setting(config: Any, *names: str, default: Any) -> Any:
    """The first setting of these names, of a config or of those inside of it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for one in (config, *inner):
        for name in names:
            if isinstance(getattr(one, name, None), (int, list, tuple)):
                return getattr(one, name)
    return default


def inputs(model: Any, every: bool) -> dict[str, Any]:
    """What a model's forward asks for, by the names of its arguments; ``every``: what it may be given, too."""
    config, asked = model.config, inspect.signature(model.forward).parameters
    ids = torch.randint(3, max(4, min(100, setting(config, "vocab_size", default=100))), (2, 12))
    side = setting(config, "image_size", "input_size", default=64)
    side = side if isinstance(side, int) else max(side)
    frames = setting(config, "num_frames", default=0)
    image = torch.randn(2, *([frames] if frames else []), setting(config, "num_channels", default=3), side, side)
    mels = setting(config, "num_mel_bins", "feature_size", "n_mels", default=80)
    given = {
        "input_ids": ids, "decoder_input_ids": ids, "pixel_values": image, "pixel_values_videos": image,
        "input_values": torch.randn(2, 4000), "input_features": torch.randn(2, mels, 200),
        "attention_mask": torch.ones(2, 12, dtype=torch.long), "bbox": torch.zeros(2, 12, 4, dtype=torch.long),
    }  # fmt: skip
    main = getattr(model, "main_input_name", "input_ids")
    needed = [n for n, p in asked.items() if every or n == main or p.default is inspect.Parameter.empty]
    wanted = [name for name in needed if name in given]
    if "decoder_input_ids" in asked and ("input_features" in wanted or "labels" not in asked):
        wanted.append("decoder_input_ids")
    found = {name: given[name] for name in dict.fromkeys([main, *wanted]) if name in given}
    name = type(model).__name__
    if "labels" in asked and "input_ids" in found and name.endswith(("LM", "Generation", "LMHeadModel")):
        found["labels"] = found["input_ids"]
    elif "labels" in asked and "Classification" in name:
        found["labels"] = torch.randint(0, getattr(config, "num_labels", 2), (2,))
    return found


def loss_of(output: Any) -> torch.Tensor:
    """A model's own loss, or the mean square of what it gives."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output.values() if hasattr(output, "values") else output
    floats = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad]
    return torch.stack([value.float().square().mean() for value in floats]).sum()


def train_step(model: Any, opt: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss = loss_of(model(**batch))
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def trained(model: Any, step: Any, every: bool) -> list[Any]:
    """Losses, parameters, buffers and the generator's state after each step."""
    opt, seen = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9), []
    for index in range(STEPS):
        torch.manual_seed(100 + index)
        numpy.random.seed(index)
        random.seed(index)
        batch = inputs(model, every)
        loss = step(model, opt, batch)
        state = [value.detach().clone() for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
        seen.append([loss, *state, torch.get_rng_state()])
    return seen


def judged(kind: str) -> dict[str, Any]:
    """How one architecture fares."""
    for model, every in ((model, every) for model in models(kind) for every in (False, True)):
        name = type(model).__name__
        try:
            want = trained(copy.deepcopy(model), train_step, every)
            again = trained(copy.deepcopy(model), train_step, every)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
            continue
        if not same(want, again):
            return {"model": name, "outcome": "eager differs from itself"}
        compiled = ws.compile(train_step)
        try:
            got = trained(model, compiled, every)
        except Exception as error:
            refused = isinstance(error, ws.errors.CaptureError)
            return {"model": name, "outcome": "refused" if refused else "raises", "why": str(error)[:200]}
        way = "co-run" if compiled.breaks else "replay"
        why = compiled.breaks[0].splitlines()[0] if compiled.breaks else ""
        return {"model": name, "outcome": "equal" if same(want, got) else "differs", "way": way, "why": why}
    return {"model": "", "outcome": "eager does not train it so"}


def same(a: list[Any], b: list[Any]) -> bool:
    """Equal bit for bit, a NaN like any other."""
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return all(torch.equal(x, y) or torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs)


def table() -> str:
    """The results as a page."""
    known = results(DOCS / "architectures.json")
    trains = {k: r for k, r in known.items() if "way" in r or r["outcome"] in ("refused", "raises", "differs")}
    counts = Counter(r.get("way", "") if r["outcome"] == "equal" else r["outcome"] for r in trains.values())
    head = f"""# Architectures of transformers

transformers has {len(known)} types of configurations. From one made small by rule, eager trains {len(trains)}
(many of the others are parts of another's, or need inputs that no rule finds). {STEPS} steps of each are compared
bit for bit in losses, parameters, buffers and random state with `ws.compile(step)`, by
`python -m tests.support.architectures`.
{"; ".join(f"{way}: {n}" for way, n in counts.most_common())}.

| architecture | model | outcome | way | why Python runs |
| --- | --- | --- | --- | --- |
"""
    rows = [f"| {k} | {r['model']} | {r['outcome']} | {r.get('way', '')} | {r.get('why', '').replace('|', '/')} |"
            for k, r in sorted(trains.items())]  # fmt: skip
    rest: dict[str, list[str]] = {}
    for kind in sorted(known.keys() - trains.keys()):
        rest.setdefault(known[kind]["outcome"], []).append(kind)
    left = "\n".join(f"- {outcome}: {', '.join(found)}" for outcome, found in rest.items())
    return head + "\n".join(rows) + f"\n\nNot compared:\n\n{left}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_args()
    if given.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(judged(given.one)))
    elif given.table:
        (DOCS / "architectures.md").write_text(table())
    else:
        walk(DOCS / "architectures.json", given.kinds or kinds(), judged)


if __name__ == "__main__":
    main()
