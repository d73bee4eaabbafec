"""Metadata keys as data: those that this package itself reads, and the types of those whose value does not tell.

A Python bool, string or non-negative int is written as bool, string or uint32, which is what readers expect of nearly
all keys. The tables below name the others: `{arch}` stands for the model family's name.
"""

from __future__ import annotations

from gguftools.gguf.values import ValueType

ALIGNMENT = "general.alignment"
ARCHITECTURE = "general.architecture"
NAME = "general.name"
FILE_TYPE = "general.file_type"
QUANTIZATION_VERSION = "general.quantization_version"
SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"

DEFAULT_ALIGNMENT = 32
#: larger ones are refused: nothing needs them, and every tensor is padded to them
MAX_ALIGNMENT = 1 << 16
#: more are refused, so that a file of zeros or of empty strings cannot keep a reader busy; no model comes near
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 21  # in all arrays of a file
MAX_BOOLS = 1 << 26  # in an array: each is looked at

_BY_TYPE = {
    ValueType.FLOAT32: """
        general.sampling.top_p general.sampling.min_p general.sampling.xtc_probability general.sampling.xtc_threshold
        general.sampling.temp general.sampling.penalty_repeat general.sampling.mirostat_tau
        general.sampling.mirostat_eta adapter.lora.alpha tokenizer.ggml.scores
        {arch}.logit_scale {arch}.residual_scale {arch}.embedding_scale {arch}.attn_logit_softcapping
        {arch}.router_logit_softcapping {arch}.final_logit_softcapping {arch}.expert_weights_scale
        {arch}.expert_group_scale {arch}.activation_sparsity_scale {arch}.swiglu_clamp_exp {arch}.swiglu_clamp_shexp
        {arch}.attention.max_alibi_bias {arch}.attention.clamp_kqv {arch}.attention.scale
        {arch}.attention.output_scale {arch}.attention.value_scale {arch}.attention.temperature_scale
        {arch}.attention.layer_norm_epsilon {arch}.attention.layer_norm_rms_epsilon
        {arch}.attention.group_norm_epsilon {arch}.attention.compress_rope_freq_base {arch}.rope.freq_base
        {arch}.rope.freq_base_swa {arch}.rope.scaling.factor {arch}.rope.scaling.alpha {arch}.rope.scaling.attn_factor
        {arch}.rope.scaling.yarn_log_multiplier {arch}.rope.scaling.yarn_ext_factor
        {arch}.rope.scaling.yarn_attn_factor {arch}.rope.scaling.yarn_beta_fast {arch}.rope.scaling.yarn_beta_slow
        {arch}.hyper_connection.epsilon {arch}.hyper_connection.magnitude {arch}.kda.gate_lower_bound
        xielu.alpha_p xielu.alpha_n xielu.beta xielu.eps""",
    ValueType.INT32: """
        general.sampling.top_k general.sampling.penalty_last_n general.sampling.mirostat split.tensors.count
        tokenizer.ggml.token_type""",
    ValueType.UINT16: "split.no split.count",
    ValueType.STRING: """
        tokenizer.ggml.tokens tokenizer.ggml.merges tokenizer.chat_templates general.tags general.languages
        imatrix.datasets {arch}.classifier.output_labels""",
}
_TYPES = {key: kind for kind, names in _BY_TYPE.items() for key in names.split()}


def type_of(key: str) -> ValueType | None:
    """The type of `key`, for an array that of its elements, or None where the value decides.

    >>> str(type_of("llama.rope.freq_base"))
    'float32'
    """
    return _TYPES.get(key, _TYPES.get("{arch}." + key.partition(".")[2]))
