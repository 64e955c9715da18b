"""Real model code from `transformers`, with tiny configurations: hidden size 16, dropout on.

`FIRST` are the models the package is built against, of two layers; `HELD_OUT` are there to find out, `READS_DATA`
decide by values: of one layer, since each captures a whole model twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.support.equal import Make, World

# Names that most configurations share.
SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
DEEPER = {"num_hidden_layers": 2}
DECODER = SMALL | {"num_key_value_heads": 1, "attention_dropout": 0.1, "pad_token_id": 0, "head_dim": 8}


def tokens(n: int = 2, length: int = 7) -> Tensor:
    """Token ids [n, length] below 23, none of them special."""
    return torch.randint(3, 23, (n, length))


def padding(ids: Tensor) -> Tensor:
    """Attention mask [N, T]: the last row's end is padding."""
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return mask


def causal() -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def masked() -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding(ids), "labels": tokens()}


def unmasked() -> dict[str, Tensor]:
    """A mask of ones: eager model code drops such a mask, and takes another kernel."""
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def seq2seq() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens(length=5)}


def image(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(3, (2,))}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 20), "labels": tokens(length=5)}


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL | DEEPER))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER | DEEPER))


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=23, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(**SMALL | DEEPER, image_size=16, patch_size=8, num_labels=3, hidden_dropout_prob=0.1)
    )


def resnet() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    )


def whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=23,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=10,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            dropout=0.1,
        )
    )


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=23, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0)
    )


def distilbert() -> nn.Module:
    return hf.DistilBertForMaskedLM(
        hf.DistilBertConfig(vocab_size=23, dim=16, n_layers=1, n_heads=2, hidden_dim=24, max_position_embeddings=32)
    )


def opt() -> nn.Module:
    return hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=23,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=24,
            max_position_embeddings=32,
            word_embed_proj_dim=16,
        )
    )


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER))


def gemma() -> nn.Module:
    return hf.GemmaForCausalLM(hf.GemmaConfig(**DECODER))


def convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4, num_labels=3)
    )


def clip() -> nn.Module:
    text = SMALL | {"eos_token_id": 22, "attention_dropout": 0.1}
    vision = {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    vision |= {"image_size": 16, "patch_size": 8, "intermediate_size": 24}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def wav2vec2() -> nn.Module:
    return hf.Wav2Vec2ForCTC(
        hf.Wav2Vec2Config(
            **SMALL,
            conv_dim=(8, 8),
            conv_stride=(4, 2),
            conv_kernel=(5, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            layerdrop=0.0,
            apply_spec_augment=False,
            ctc_loss_reduction="mean",
        )
    )


def deberta() -> nn.Module:
    return hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
    )


def mobilebert() -> nn.Module:
    return hf.MobileBertForMaskedLM(
        hf.MobileBertConfig(
            **SMALL, embedding_size=16, intra_bottleneck_size=8, true_hidden_size=8, hidden_dropout_prob=0.1
        )
    )


def falcon() -> nn.Module:
    return hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, attention_dropout=0.1, alibi=True
        )
    )


def gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, hidden_dropout=0.1))


def bart() -> nn.Module:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=23,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
        )
    )


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2))


def for_clip() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def for_wav2vec2() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 160), "labels": tokens(length=4)}


Maker = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]
FIRST: dict[str, Maker] = {
    "bert": (bert, masked),
    "gpt2": (gpt2, causal),
    "llama": (llama, masked),
    "t5": (t5, seq2seq),
    "vit": (vit, image),
    "resnet": (resnet, image),
    "whisper": (whisper, speech),
    "mamba": (mamba, causal),
}
HELD_OUT: dict[str, Maker] = {
    "distilbert": (distilbert, masked),
    "opt": (opt, masked),
    "qwen2": (qwen2, causal),
    "gemma": (gemma, masked),
    "convnext": (convnext, image),
    "clip": (clip, for_clip),
    "deberta": (deberta, masked),
    "mobilebert": (mobilebert, masked),
    "falcon": (falcon, causal),
    "gpt_neox": (gpt_neox, masked),
    "bart": (bart, seq2seq),
    "mixtral": (mixtral, masked),
}


READS_DATA: dict[str, Maker] = {
    "wav2vec2": (wav2vec2, for_wav2vec2),
    "bert": (bert, unmasked),
    "llama": (llama, unmasked),
    "bart": (bart, unmasked),
}


def training(build: Callable[[], nn.Module], data: Callable[[], dict[str, Any]], outputs: bool = False) -> Make:
    """A world that trains a transformers model with AdamW; ``outputs`` also returns the whole model output."""

    def make(seed: int) -> World:
        model = build().train()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(batch: dict[str, Any]) -> Any:
            out = model(**batch)
            out.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
            return out if outputs else out.loss

        return World(step, [(data(),) for _ in range(2)], {"model": model, "opt": adam})

    return make
