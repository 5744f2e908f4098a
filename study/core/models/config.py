"""The config of a model, the kind of model that it describes, and transformers' class for it."""

from collections.abc import Mapping
from typing import Any, Literal, cast

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto import modeling_auto as names

from study.core import shapes
from study.core.errors import Stop
from study.core.shapes import SHAPES, VOCABULARY, config_of

Kind = Literal["decoder", "encoder", "seq2seq", "vision", "speech"]
OWN_ATTENTION = ("falcon",)  # model types that know no attention but transformers' own names
# transformers' fused attention under names for which it builds no mask. The second is refused by no model: for a trace
# it stands for FlashAttention, which keeps as much.
CAUSAL = {"sdpa": "causal_sdpa", "flash": "causal_fused"}
# Each kind with transformers' table of its model types, and its Auto class. The first matching table decides.
TABLES: dict[Kind, tuple[Mapping[str, object], type]] = {
    "speech": (names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, transformers.AutoModelForSpeechSeq2Seq),
    "vision": (names.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, transformers.AutoModelForImageClassification),
    "seq2seq": (names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
    "encoder": (names.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForSequenceClassification),
    "decoder": (names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
}
# Names for the number of positions in a config; the last is Whisper's.
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")


def load(
    model: str,
    *,
    vocabulary: int = VOCABULARY,
    attention: str | None = None,
    dropout: float | None = None,
) -> PretrainedConfig:
    """Return the config of a built-in shape, a folder or a hub name, changed for training.

    `vocabulary` is for shapes whose vocabulary is that of their data. `dropout` replaces every probability.
    """
    if model in SHAPES:
        return of_dict(config_of(model, vocabulary), attention, dropout)
    shapes.refuse_code(model)
    try:
        shapes.prepare_to_load(model)
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        raise shapes.not_found(model, error) from error
    return _for_training(config, attention, dropout)


def of_dict(values: dict, attention: str | None = None, dropout: float | None = None) -> PretrainedConfig:
    """Return the same as `load`, from the content of a config.json. It needs no file and no network."""
    # Neither a key of ours, nor the classes of code that came with the model: those here are transformers' own.
    known = {key: value for key, value in values.items() if key not in ("hub", "auto_map")}
    try:
        config = AutoConfig.for_model(**known)
    except Exception as error:  # whatever a wrong value leads to
        what = f"transformers {transformers.__version__} cannot read the config ({' '.join(str(error).split())[:200]})"
        raise Stop(what, "give the config.json of a model that it has, with its model_type") from error
    return _for_training(config, attention, dropout)


def architectures(model_type: str) -> list[str]:
    """Return what a config.json of such a model says: the class of the published weights. TRL builds a model by it."""
    return [str(table[model_type]) for table, _ in TABLES.values() if model_type in table][:1]


def _for_training(config: PretrainedConfig, attention: str | None, dropout: float | None) -> PretrainedConfig:
    """Return a config as the trainer uses it. Without `attention` it is fused, if transformers has that."""
    config = _part_that_trains(config)
    config.use_cache = False  # of keys and values, which only generation needs
    fused = class_for(config)._supports_sdpa
    attention = attention or ("sdpa" if fused else "eager")
    if attention == "sdpa" and not fused:
        raise Stop(f"transformers has no fused attention for {config.model_type}", "give --attention eager")
    config._attn_implementation = attention
    is_causal = kind_of(config) in ("decoder", "seq2seq", "speech")
    if attention in CAUSAL and is_causal and config.model_type not in OWN_ATTENTION:
        # Under this name transformers builds no mask and uses the causal kernel. That is right, as no row is padded.
        config._attn_implementation = CAUSAL[attention]
        transformers.AttentionInterface.register(CAUSAL[attention], _uncapped)
    if dropout is not None:
        # By name: hidden_dropout_prob, attn_pdrop, resid_pdrop, classifier_dropout, embd_pdrop and others.
        for name, value in config.to_dict().items():
            if "drop" in name and type(value) in (int, float):
                setattr(config, name, dropout)
    return config


def _uncapped(*args, softcap: float | None = None, **more):
    """Fused attention. Only for a trace it is asked for a cap of scores, which changes no size."""
    return sdpa_attention_forward(*args, **more)


def _part_that_trains(config: PretrainedConfig) -> PretrainedConfig:
    whole = find_class(config)
    if whole is None or "ConditionalGeneration" in whole.__name__:  # it may read images or sound beside text
        text = config.get_text_config()
        if find_class(text) and kind_of(config) in (None, "decoder"):
            return text
    return config


def kind_of(config: PretrainedConfig) -> Kind | None:
    """Return the kind of a model. Text models that can mask words, such as BERT, classify rows here."""
    kinds = [kind for kind, (types, _) in TABLES.items() if config.model_type in types]
    if "seq2seq" in kinds and not getattr(config, "is_encoder_decoder", False):
        kinds = [kind for kind in kinds if kind == "decoder"]
    return kinds[0] if kinds else None


def class_for(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for this config, or raise Stop if it has none."""
    # It is not an Auto class: under stage 3 those would partition the model while it is built.
    if (model_class := find_class(config)) is None:
        what = f"transformers {transformers.__version__} has no class to train a model of type {config.model_type}"
        raise Stop(what, "give a text decoder or encoder, an encoder-decoder, an image classifier or a speech model")
    return model_class


def find_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' class for this config; None if there is none."""
    kind = kind_of(config)
    if kind is None:
        return None
    classes = cast(Mapping[type, Any], vars(TABLES[kind][1])["_model_mapping"])
    model_class = classes.get(type(config), None)  # it is lazy, and takes no default by itself
    if isinstance(model_class, tuple):
        return model_class[0]  # DeiT's second one has a teacher
    return model_class


def sequence_limit(config: PretrainedConfig) -> int | None:
    """Return the most tokens of a row. None if the config says nothing."""
    if kind_of(config) in ("seq2seq", "vision"):
        return None  # T5's positions are relative, and its n_positions says nothing
    for name in POSITIONS:
        most = getattr(config, name, None)
        if isinstance(most, int) and most > 0:
            return most
    return None
