"""The zoo: tiny random models of many architectures, each with one training call.

``ENTRIES`` maps a name to an :class:`Entry`; what an entry changes in its configuration is in its
line. Names with a slash run the same architecture with another implementation of attention,
another head, or another switch.
"""

from __future__ import annotations

from functools import partial

import torch
import zoo_inputs as inputs_of
from zoo_builders import BASE, ENTRIES, Entry, add, plain
from zoo_inputs import CLASSES, IMAGE, VOCAB
from zoo_plain import DecoderLayers, EncoderLayers, Gpt, SelfAttention

__all__ = ["ENTRIES", "Entry"]

WINDOWS = ["sliding_attention", "full_attention"]
SCANS = ["linear_attention", "full_attention"]
BOTH, EAGER = ("sdpa", "eager"), ("eager",)
decoder = partial(
    add, family="decoder", head="AutoModelForCausalLM", inputs=inputs_of.causal
)
experts = partial(decoder, family="experts", dtype=torch.float32)
scan = partial(decoder, family="state space")

decoder("llama", attention=BOTH)
decoder("llama/cache", model="llama", use_cache=True)
decoder("llama/padded", model="llama", inputs=inputs_of.causal_padded)
decoder(
    "llama/classify",
    model="llama",
    head="AutoModelForSequenceClassification",
    inputs=inputs_of.classified,
)
decoder("mistral", attention=BOTH)
decoder("qwen2", attention=BOTH)
decoder("qwen3")
decoder("gemma")
decoder("gemma2", attention=EAGER)
decoder("gemma3_text", layer_types=WINDOWS)
decoder("phi")
decoder("phi3")
decoder("gpt2", attention=BOTH)
decoder("gpt_neo", attention=EAGER, attention_types=[[["global", "local"], 1]])
decoder("gpt_neox", attention=BOTH)
decoder("gptj", attention=EAGER, rotary_dim=4)
decoder("codegen", attention=EAGER, rotary_dim=4)
decoder("gpt_bigcode", attention=BOTH, num_key_value_heads=1)
decoder("falcon", new_decoder_architecture=True, num_kv_heads=2)
decoder("falcon/old", model="falcon", multi_query=True, attention=BOTH)
decoder("falcon/alibi", model="falcon", alibi=True, attention=BOTH)
decoder("bloom", attention=EAGER)
decoder("bloom/padded", model="bloom", attention=EAGER, inputs=inputs_of.causal_padded)
decoder("mpt", attention=EAGER, max_seq_len=64)
decoder("opt", word_embed_proj_dim=32)
decoder("glm")
decoder("glm4")
decoder("cohere")
decoder("cohere2", layer_types=WINDOWS)
decoder("granite")
decoder("stablelm")
decoder("starcoder2")
decoder("olmo")
decoder("olmo2")
decoder("olmo3", layer_types=WINDOWS)
decoder("smollm3", no_rope_layers=[1, 0])
decoder("nemotron")
decoder("persimmon")
decoder("exaone4", layer_types=WINDOWS)
decoder("ernie4_5")
decoder("hunyuan_v1_dense")
decoder("helium")
decoder("apertus")
# It subtracts two softmaxes that it computes in float32.
decoder("diffllama", attention=BOTH, tolerance=5e-6)
decoder("modernbert-decoder", layer_types=WINDOWS, local_attention=12)
decoder("biogpt")
decoder("xglm", attention=EAGER, attention_heads=4, dtype=torch.float32)
decoder("openai-gpt", attention=EAGER)
decoder("ctrl", attention=EAGER, dff=48)

experts("mixtral")
experts("qwen2_moe")
experts("qwen3_moe")
experts("phimoe")
experts("gpt_oss", attention=EAGER, layer_types=WINDOWS)
experts("granitemoe")
experts("olmoe")
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    head_dim=4,
    first_k_dense_replace=1,
)
experts("deepseek_v2", **LATENT)
experts("deepseek_v3", n_group=2, topk_group=1, **LATENT)
experts("llama4_text", attention_chunk_size=6, intermediate_size_mlp=48)
experts("hunyuan_v1_moe", moe_topk=2)
experts("glm4_moe", first_k_dense_replace=1)
experts("ernie4_5_moe", moe_layer_start_index=1, moe_layer_end_index=1)
experts(
    "dbrx",
    attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    d_model=32,
    ffn_config={"ffn_hidden_size": 24, "moe_top_k": 2},
)

MAMBA2 = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8
)  # of the hybrids
scan(
    "qwen3_next",
    layer_types=SCANS,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    dtype=torch.float32,
)
scan(
    "jamba",
    attn_layer_period=2,
    attn_layer_offset=1,
    mamba_dt_rank=4,
    dtype=torch.float32,
)
scan("bamba", attn_layer_indices=[1], **MAMBA2)
scan("falcon_h1", mamba_d_ssm=64, **MAMBA2)
scan("mamba", attention=EAGER, state_size=8, time_step_rank=4)
scan("mamba2", attention=EAGER, num_heads=8, n_groups=2, state_size=8, chunk_size=8)
scan(
    "recurrent_gemma",
    block_types=["recurrent", "attention"],
    lru_width=32,
    attention_window_size=6,
)
scan("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=16)
scan("minimax", layer_types=SCANS, block_size=8, dtype=torch.float32)

encoder = partial(
    add, family="encoder", head="AutoModelForMaskedLM", inputs=inputs_of.masked
)
encoder("bert", attention=BOTH)
encoder(
    "bert/classify",
    model="bert",
    head="AutoModelForSequenceClassification",
    inputs=inputs_of.classified,
    num_labels=CLASSES,
)
encoder(
    "bert/tokens",
    model="bert",
    head="AutoModelForTokenClassification",
    inputs=inputs_of.classified_tokens,
    num_labels=CLASSES,
)
encoder(
    "bert/answer",
    model="bert",
    head="AutoModelForQuestionAnswering",
    inputs=inputs_of.answered,
)
encoder("roberta")
encoder("distilbert", hidden_dim=48)
encoder("electra")
encoder("albert")
encoder("esm", mask_token_id=4)
encoder("modernbert", attention=BOTH, layer_types=WINDOWS, local_attention=24)
encoder(
    "deberta-v2",
    attention=EAGER,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=8,
)
encoder("xlm-roberta")
encoder("mpnet", attention=EAGER)
encoder("roformer", attention=EAGER)

seq2seq = partial(
    add,
    family="encoder-decoder",
    head="AutoModelForSeq2SeqLM",
    inputs=inputs_of.translated,
)
SMALL_T5 = dict(
    d_kv=8, d_ff=48, relative_attention_max_distance=64, decoder_start_token_id=0
)
seq2seq("t5", attention=EAGER, **SMALL_T5)
seq2seq("mt5", attention=EAGER, **SMALL_T5)
seq2seq("umt5", attention=EAGER, **SMALL_T5)
seq2seq("bart", attention=BOTH)
seq2seq("mbart")
seq2seq("pegasus")
seq2seq("m2m_100")
seq2seq("marian", decoder_vocab_size=VOCAB)
seq2seq("led", attention=EAGER, attention_window=8, max_encoder_position_embeddings=64)
seq2seq(
    "whisper",
    head="WhisperForConditionalGeneration",
    inputs=inputs_of.mel_transcribed,
    max_target_positions=64,
)

vision = partial(
    add,
    family="tower",
    head="AutoModelForImageClassification",
    inputs=inputs_of.image,
    lengths=(0,),
    num_labels=CLASSES,
)
vision("vit", attention=BOTH)
vision("dinov2")
vision("deit", head="DeiTForImageClassification")
vision("beit", use_relative_position_bias=True)
TOWER = {name: BASE[name] for name in list(BASE)[:5]}
PIXELS = {**TOWER, "image_size": IMAGE, "patch_size": 8, "projection_dim": 16}
TEXT = {**TOWER, "max_position_embeddings": 64, "eos_token_id": 2, "projection_dim": 16}
vision(
    "siglip_vision_model",
    model="siglip",
    head="SiglipForImageClassification",
    vision_config=PIXELS,
)
vision(
    "clip_vision_model",
    model="clip",
    head="CLIPForImageClassification",
    vision_config=PIXELS,
)
add(
    "clip",
    "tower",
    "CLIPModel",
    inputs_of.image_and_text,
    projection_dim=16,
    text_config=TEXT,
    vision_config=PIXELS,
)
vision(
    "whisper_encoder",
    model="whisper",
    head="WhisperForAudioClassification",
    inputs=inputs_of.mel_classified,
)
WAVE = dict(
    conv_dim=[16, 16],
    conv_kernel=[4, 3],
    conv_stride=[2, 2],
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    apply_spec_augment=False,
)
wave = partial(
    add,
    family="tower",
    head="AutoModelForAudioClassification",
    inputs=inputs_of.wave_classified,
    prepare="freeze_feature_encoder",
    num_labels=CLASSES,
)
wave("wav2vec2", **WAVE)
wave("hubert", **WAVE)
add(
    "wav2vec2/ctc",
    "tower",
    "AutoModelForCTC",
    inputs_of.wave_transcribed,
    model="wav2vec2",
    **WAVE,
)


plain("encoder_layer", partial(EncoderLayers, norm_first=True, causal=False))
plain("encoder_layer/post_norm", partial(EncoderLayers, norm_first=False, causal=False))
plain("encoder_layer/causal", partial(EncoderLayers, norm_first=True, causal=True))
plain("multihead_attention", partial(SelfAttention, need_weights=False))
plain("multihead_attention/weights", partial(SelfAttention, need_weights=True))
plain("decoder_layer", DecoderLayers, inputs_of.hidden_pair)
plain("gpt", partial(Gpt, flash=False), inputs_of.tokens)
plain("gpt/flash", partial(Gpt, flash=True), inputs_of.tokens)
