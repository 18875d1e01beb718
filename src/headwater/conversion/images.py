"""The families of image models: ViT and DeiT. Checkpoints of DeiT without distillation have the config of a ViT."""

from dataclasses import replace

from transformers import DeiTForImageClassification, ViTForImageClassification

from headwater.conversion.family import LAYER, Family, Link, link_modules, same_names
from headwater.models.image_classification import HeadwaterForImageClassification


def _make_links(base: str) -> tuple[Link, ...]:
    layer = f"{base}.layers.{{}}."
    maps = {f"{layer}attention.{letter}_proj": f"{LAYER}self_attn.{letter}_proj" for letter in "qkvo"}
    return (
        Link(f"{base}.embeddings.cls_token", ("model.class_token",), "parameter"),
        Link(f"{base}.embeddings.position_embeddings", ("model.embed_positions",), "parameter"),
        Link(f"{base}.embeddings.patch_embeddings.projection", ("model.embed_patches",), "convolution"),
        *link_modules(
            maps
            | {
                f"{layer}layernorm_before": f"{LAYER}input_layernorm",
                f"{layer}layernorm_after": f"{LAYER}post_attention_layernorm",
                f"{layer}mlp.fc1": f"{LAYER}mlp.up_proj",
                f"{layer}mlp.fc2": f"{LAYER}mlp.down_proj",
                f"{base}.layernorm": "model.norm",
                "classifier": "classifier",
            }
        ),
    )


VIT = Family(
    model=ViTForImageClassification,
    headwater_model=HeadwaterForImageClassification,
    fields=same_names(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "initializer_range",
        "image_size",
        "patch_size",
        "num_channels",
        "qkv_bias",
        "id2label",
        "label2id",
    )
    | dict(
        norm_eps="layer_norm_eps",
        embedding_dropout="hidden_dropout_prob",
        residual_dropout="hidden_dropout_prob",
        attention_dropout="attention_probs_dropout_prob",
    ),
    links=_make_links("vit"),
)

# DeiT's distillation token becomes a register: headwater has only the class token's classifier.
DEIT = replace(
    VIT,
    model=DeiTForImageClassification,
    fixed=dict(register_tokens=1),
    links=(*_make_links("deit"), Link("deit.embeddings.distillation_token", ("model.registers",), "parameter")),
)
