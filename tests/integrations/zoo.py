"""Small models of transformers with random weights, and how much of each LPR treats.

`python -m tests.integrations.zoo` prints the table of docs/integrations.md.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from proxreplay import LPR

WORDS = {"vocab_size": 40}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {"hidden_size": 16, "intermediate_size": 24}
CAUSAL = {**WORDS, **SMALL, **WIDE, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 3}
FINE = IMAGE | {"patch_size": 2}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
BERT = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}

MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "ViT": lambda t: t.ViTForImageClassification(t.ViTConfig(**SMALL, **WIDE, **IMAGE)),
    "BERT": lambda t: t.BertForSequenceClassification(t.BertConfig(**WORDS, **SMALL, **WIDE)),
    "GPT-2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**WORDS, **GPT)),
    "Llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**CAUSAL)),
    "Qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**CAUSAL)),
    "Gemma": lambda t: t.GemmaForCausalLM(t.GemmaConfig(**CAUSAL)),
    "T5": lambda t: t.T5ForConditionalGeneration(t.T5Config(**WORDS, **T5)),
    "DistilBERT": lambda t: t.DistilBertForSequenceClassification(
        t.DistilBertConfig(**WORDS, **BERT)
    ),
    "ResNet": lambda t: t.ResNetForImageClassification(t.ResNetConfig(embedding_size=8, **STAGES)),
    "ConvNeXt": lambda t: t.ConvNextForImageClassification(
        t.ConvNextConfig(num_stages=2, **STAGES)
    ),
    "MobileNetV2": lambda t: t.MobileNetV2ForImageClassification(
        t.MobileNetV2Config(depth_multiplier=0.1, num_labels=3)
    ),
    "DINOv2": lambda t: t.Dinov2ForImageClassification(
        t.Dinov2Config(hidden_size=16, **SMALL, **IMAGE)
    ),
    "Swin": lambda t: t.SwinForImageClassification(
        t.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, **FINE)
    ),
    "Mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=2, **CAUSAL)),
}


def call_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Two examples."""
    rng = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=rng)}
    tokens = torch.randint(2, 40, (2, 5), generator=rng)
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    return {"input_ids": tokens, **decoder}


def treated(name: str) -> tuple[float, dict[str, str]]:
    """The share of a model's trained parameters that is treated, and why others are not."""
    import transformers

    torch.manual_seed(0)
    model = MODELS[name](transformers)
    lpr = LPR(model)
    lpr.refresh([call_of(model)])
    named = dict(model.named_parameters(remove_duplicate=False))
    covered = {id(named[p]) for layer in lpr.layers.values() for p in layer.parameters}
    sizes = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    return sum(sizes[one] for one in covered) / sum(sizes.values()), lpr.untreated


def line(name: str) -> str:
    """A row of the table."""
    share, untreated = treated(name)
    reasons = sorted({f"`{key.rpartition('.')[2]}`: {why}" for key, why in untreated.items()})
    return f"| {name} | {share:.1%} | {' '.join(reasons)} |"


if __name__ == "__main__":
    print("| model | treated | left alone |\n|---|---|---|")
    for one in MODELS:
        print(line(one), flush=True)
