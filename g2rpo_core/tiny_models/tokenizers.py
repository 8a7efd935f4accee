"""Make the tiny models' tokenizers without a hub: CLIP's own, and T5's, Qwen's and BERT's.

All but CLIP's are made from the captions' words.
"""

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import open_clip
from open_clip.tokenizer import bytes_to_unicode
from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import BertTokenizer, CLIPTokenizer, Qwen2TokenizerFast, T5TokenizerFast

from g2rpo_core.tasks.task import Task

T5_LENGTH = 12  # tokens; captions of any task have at most 11
CLIP_LENGTH = 16  # tokens; the published CLIP has 77, captions of any task have at most 12

QWEN_LENGTH = 32  # tokens: captions, and the template around them
TEMPLATES = (  # the words of Qwen-Image's template and of a chat's
    "system user assistant Describe the image by detailing the color shape size texture quantity "
    "text spatial relationships of the objects and"
    " background"
)
THOUGHT = "<think>\n\n</think>\n\n"
CHAT = (  # the part of Qwen3's template that one turn of a user needs
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}"
    + THOUGHT
    + "{% endif %}{% endif %}"
)


def clip_tokenizer() -> CLIPTokenizer:
    """Make CLIP's byte-pair tokenizer, with the published ids, from open_clip's vocabulary file."""
    path = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
    merges = gzip.decompress(path.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    letters = list(bytes_to_unicode().values())
    words = (
        letters
        + [letter + "</w>" for letter in letters]
        + ["".join(merge.split()) for merge in merges]
    )
    vocabulary = {
        token: index for index, token in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
        Path(folder, "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        end = "<|endoftext|>"
        special = {
            "bos_token": "<|startoftext|>",
            "eos_token": end,
            "unk_token": end,
            "pad_token": end,
        }
        config = {
            "tokenizer_class": "CLIPTokenizer",
            "model_max_length": CLIP_LENGTH,
            "do_lower_case": True,
            **special,
        }
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        return CLIPTokenizer.from_pretrained(folder)


def t5_tokenizer(task: Task) -> T5TokenizerFast:
    """Make a unigram tokenizer in T5's form: a token per word of the task, letters for others."""
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((f"▁{word}", -3.0) for word in _words(task)),
    ]
    vocabulary += [(letter, -10.0) for letter in ["▁", *map(chr, range(33, 127))]]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=T5_LENGTH)


def qwen_tokenizer(task: Task) -> Qwen2TokenizerFast:
    """Make a byte-level BPE tokenizer in Qwen's form, with Qwen3's chat template.

    Each word of the task and of the template is one token.
    """
    end = "<|endoftext|>"
    words = [*_words(task), *TEMPLATES.split()]
    made = byte_level(words, [end, "<|im_start|>", "<|im_end|>"], [THOUGHT])
    made.pad_token = end
    made.eos_token = "<|im_end|>"
    made.chat_template = CHAT
    made.model_max_length = QWEN_LENGTH
    return made


def byte_level(words: Iterable[str], special: list[str], fixed: list[str]) -> Qwen2TokenizerFast:
    """Make a byte-level BPE tokenizer of Qwen's class: a token per word, special and fixed text."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [f"{word} {word}" for word in words] * 8,
        vocab_size=1000,
        min_frequency=2,
        show_progress=False,
    )
    model = json.loads(trained.to_str())["model"]
    made = Qwen2TokenizerFast(
        vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]]
    )
    made.add_special_tokens({"additional_special_tokens": special})
    made.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    return made


def bert_tokenizer(task: Task) -> BertTokenizer:
    """Make a WordPiece tokenizer like bert-base-uncased's: a token per word, letters for others."""
    letters = list(map(chr, range(33, 65))) + list(map(chr, range(91, 127)))  # all but the capitals
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *_words(task),
        *letters,
        *("##" + letter for letter in letters),
    ]
    return BertTokenizer(
        vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
        do_lower_case=True,
    )


TOKENIZERS: dict[str, Callable[[Task], Any]] = {
    "clip": lambda _: clip_tokenizer(),
    "t5": t5_tokenizer,
    "qwen": qwen_tokenizer,
}


def _words(task: Task) -> list[str]:
    """Return every word of the task's captions, sorted."""
    return sorted({word for phrase in task.phrases for word in phrase.split()})
