"""Small architectures of transformers train and evaluate as in torch."""

import numpy as np
import pytest
from tests.oracle.compare_modules import assert_trains_as_in_torch
from tests.oracle.zoo import nn, torch, transformers

pytestmark = pytest.mark.torch_all
NUM_TOKENS, NUM_CLASSES, LENGTH = 50, 5, 12
SIZES = {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2, "use_cache": False}
ENCODER = SIZES | {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": NUM_CLASSES}
PLAIN_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
STAGES = {"depths": [1, 1], "num_labels": NUM_CLASSES}

WORDS = {
    "Llama": ("LlamaForCausalLM", DECODER),
    "Mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 4}),
    "Mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 4}),
    "Qwen2": ("Qwen2ForCausalLM", DECODER),
    "Qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 8}),
    "Gemma": ("GemmaForCausalLM", DECODER | {"head_dim": 8}),
    "Gemma2": ("Gemma2ForCausalLM", DECODER | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "Phi": ("PhiForCausalLM", DECODER | {"resid_pdrop": 0.0}),
    "Phi3": ("Phi3ForCausalLM", DECODER | {"pad_token_id": 0}),
    "Falcon": ("FalconForCausalLM", SIZES | {"num_hidden_layers": 2, "use_cache": False}),
    "GPTNeoX": ("GPTNeoXForCausalLM", ENCODER | {"use_cache": False}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": NUM_TOKENS, "n_layer": 2, "n_embd": 32, "n_head": 4, "use_cache": False,
                                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "OPT": ("OPTForCausalLM", {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64,
                               "num_attention_heads": 4, "word_embed_proj_dim": 32, "use_cache": False,
                               "dropout": 0.0}),
    "Bloom": ("BloomForCausalLM", {"vocab_size": NUM_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4,
                                   "use_cache": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "Rwkv": ("RwkvForCausalLM", {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 2,
                                 "attention_hidden_size": 32, "intermediate_size": 64, "use_cache": False}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 2,
                                   "state_size": 4, "use_cache": False}),
    "Bert": ("BertForMaskedLM", ENCODER),
    "Roberta": ("RobertaForMaskedLM", ENCODER),
    "Electra": ("ElectraForMaskedLM", ENCODER | {"embedding_size": 16}),
    "Albert": ("AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "DebertaV2": ("DebertaV2ForMaskedLM", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DistilBert": ("DistilBertForMaskedLM", {"vocab_size": NUM_TOKENS, "dim": 32, "n_layers": 2, "n_heads": 4,
                                             "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}),
}  # fmt: skip
PAIRS = {
    "T5": ("T5ForConditionalGeneration", {"vocab_size": NUM_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64,
                                          "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "use_cache": False}),
    "Bart": ("BartForConditionalGeneration", {
        "vocab_size": NUM_TOKENS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "use_cache": False,
        **PLAIN_DROPOUT}),
}  # fmt: skip
PICTURES = {
    "ViT": ("ViTForImageClassification", ENCODER | IMAGES),
    "Deit": ("DeiTForImageClassification", ENCODER | IMAGES),
    "Beit": ("BeitForImageClassification", ENCODER | IMAGES | {"drop_path_rate": 0.0}),
    "Swin": ("SwinForImageClassification", IMAGES | STAGES | {
        "patch_size": 2, "embed_dim": 8, "num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0}),
    "ResNet": ("ResNetForImageClassification", STAGES | {
        "layer_type": "basic", "hidden_sizes": [8, 16], "embedding_size": 8}),
    "ConvNext": ("ConvNextForImageClassification", STAGES | {
        "hidden_sizes": [8, 16], "num_stages": 2, "drop_path_rate": 0.0}),
    "ConvNextV2": ("ConvNextV2ForImageClassification", STAGES | {
        "hidden_sizes": [8, 16], "num_stages": 2, "drop_path_rate": 0.0}),
}  # fmt: skip


class Logits(nn.Module):
    """Return the logits of a model; `names` are the model's names of its input."""

    def __init__(self, architecture, options, names):
        super().__init__()
        torch.manual_seed(0)
        kind = getattr(transformers, architecture)
        self.model, self.names = kind(kind.config_class(**options)), names

    def forward(self, x):
        return self.model(**dict.fromkeys(self.names, x)).logits


def next_token(outputs, batch):
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def label(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["y"])


def words(rows):
    x = np.random.default_rng(rows).integers(2, NUM_TOKENS, (rows, LENGTH)).astype(np.int32)
    return {"x": x, "y": x}


def pictures(rows):
    random = np.random.default_rng(rows)
    return {
        "x": random.normal(size=(rows, 3, 16, 16)).astype(np.float32),
        "y": random.integers(0, NUM_CLASSES, rows).astype(np.int32),
    }


CASES = {
    **{name: (*case, ["input_ids"], next_token, words) for name, case in WORDS.items()},
    **{name: (*case, ["input_ids", "decoder_input_ids"], next_token, words) for name, case in PAIRS.items()},
    **{name: (*case, ["pixel_values"], label, pictures) for name, case in PICTURES.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_architecture_trains_and_evaluates_as_in_torch(name):
    architecture, options, names, loss, make_batch = CASES[name]
    assert_trains_as_in_torch(Logits(architecture, options, names), loss, (3,), make_batch, is_file=False)
