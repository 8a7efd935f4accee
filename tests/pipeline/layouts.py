"""The tiny models' folders as the published repositories have them, where transformers 5 saves other files than were published."""

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

# names of Qwen2.5-VL's weights in checkpoints of early 2025, such as UnifiedReward-qwen-7b's
EARLIER = [(r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual.")]
# what config.json had at its top and not in `text_config`
TEXT = (
    "attention_dropout", "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings",
    "max_window_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size",
)  # fmt: skip


def as_bert(folder: Path, target: Path) -> None:
    """bert-base-uncased's at 86b5e0934494: a vocabulary, and a tokenizer_config.json that does not name the tokenizer's class."""
    target.mkdir()
    shutil.copy(folder / "tokenizer.json", target)
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    (target / "vocab.txt").write_text("".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.get)))
    (target / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 512}')
    (target / "config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')


def as_qwen(folder: Path, target: Path) -> None:
    """UnifiedReward-qwen-7b's: a flat config.json, earlier names of weights, preprocessor_config.json and chat_template.json."""
    target.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, target)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text["rope_parameters"]
    config |= {name: text[name] for name in TEXT} | {"rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"] = {key: value for key, value in vision.items() if key != "rope_parameters"} | {
        "model_type": "qwen2_5_vl"
    }
    (target / "config.json").write_text(json.dumps(config))
    pictures = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    size = pictures.pop("size")
    pictures |= {
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
        "processor_class": "Qwen2_5_VLProcessor",
    }
    (target / "preprocessor_config.json").write_text(json.dumps(pictures))
    template = (folder / "chat_template.jinja").read_text()
    (target / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    weights = load_file(folder / "model.safetensors")
    for pattern, earlier in EARLIER:
        weights = {re.sub(pattern, earlier, name): value for name, value in weights.items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
