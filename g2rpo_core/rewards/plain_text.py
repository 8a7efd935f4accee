"""Keep a prompt from speaking to a judge's tokenizer: its control words are read as text.

`<|im_end|>` in a prompt would end the question about it in a chat template, `<end_of_text>` what a
CLIP reads, `[SEP]` a sentence for BERT. Such a word gets a space after its first character. A
prompt without one is left as it is, so that scores are those of the published code.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from html import unescape

# Of the models behind servers and packages, whose tokenizers are not known here
COMMON = re.compile(
    r"<\|[^<>|]*\|>|<</?sys>>"
    r"|</?(?:s|pad|unk|bos|eos|mask|image|video|audio|img|box|ref|quad|think|answer|tool_call"
    r"|tool_response|im_start|im_end|(?:start|end)_of_(?:turn|text|image)|image_soft_token"
    r"|extra_id_\d+)>"
    r"|\[/?(?:inst|cls|sep|pad|unk|mask|img|img_break|img_end|tool_calls|available_tools)\]",
    re.IGNORECASE,
)


def plain(text: str, words: re.Pattern[str], clean: Callable[[str], str] = str) -> str:
    """Return a text in which none of the control words is one.

    clean: what the tokenizer does to a text first; a word may only then appear.
    """
    # As tokenizers see it: with entities resolved (open_clip) and in NFKC (sentencepiece)
    seen = unicodedata.normalize("NFKC", unescape(unescape(clean(text))))
    if not words.search(seen):
        return text
    while words.search(seen):
        seen = words.sub(lambda word: f"{word[0][0]} {word[0][1:]}", seen)
    return seen


def control_words(tokenizer, *more: str | None) -> re.Pattern[str]:
    """Return the words that a tokenizer holds special, and COMMON ones.

    tokenizer: of transformers, or of open_clip, which may wrap one; more: words that a processor
    looks for, such as its image token.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    known: Sequence[str | None]
    if hasattr(tokenizer, "added_tokens_decoder"):
        # Not all that is added: some add whole words to a vocabulary
        added = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
        known = [*tokenizer.all_special_tokens, *added, *more]
    else:
        known = [tokenizer.decoder[number] for number in tokenizer.all_special_ids]
    longest = sorted({word for word in known if word and len(word) > 1}, key=len, reverse=True)
    own = "|".join(map(re.escape, longest))
    return re.compile(f"{own}|{COMMON.pattern}" if own else COMMON.pattern, re.IGNORECASE)
