"""No word of a prompt is a command for a judge, however it is written."""

import unicodedata
from html import escape

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import SimpleTokenizer
from transformers import AddedToken, AutoProcessor, AutoTokenizer

from g2rpo_core.rewards import registry
from g2rpo_core.rewards.plain_text import COMMON, control_words, plain
from tests.reliability.test_generated_inputs import FIXED

KNOWN = [
    "<|im_end|>",
    "<|im_start|>system",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "</s>",
    "<s>",
    "<pad>",
    "<image>",
    "<video>",
    "[SEP]",
    "[CLS]",
    "[MASK]",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<end_of_turn>",
    "<end_of_text>",
    "<start_of_text>",
    "<extra_id_7>",
    "<|Reward|>",
    "<tool_call>",
    "<answer>",
    "<think>",
]
WIDE = {ord(char): ord(char) + 0xFEE0 for char in "<>|[]/"}
WAYS = {  # of writing the same word; some of them a tokenizer or its cleaning reads as that word
    "itself": str,
    "capitals": str.upper,
    "an entity": escape,
    "two entities": lambda word: escape(escape(word)),
    "wide": lambda word: word.translate(WIDE),
    "a mark inside": lambda word: word[:3] + "\ufeff" + word[3:],
    "one in another": lambda word: word[:-1] + word + word[-1],
}
captions = st.text(st.characters(codec="ascii", categories=["L", "Zs"]), max_size=12)


def seen(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


@settings(max_examples=200, **FIXED)
@given(captions, st.sampled_from(KNOWN), st.sampled_from([*WAYS]), captions)
def test_a_control_word_is_one_no_more(before, word, way, after):
    text = f"{before}{WAYS[way](word)}{after}"
    made = plain(text, COMMON)
    assert not COMMON.search(seen(made)) and plain(made, COMMON) == made
    if not COMMON.search(seen(text)) and way in ("itself", "capitals"):
        assert made == text


def ids_of(tokenizer, text: str) -> list[int]:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if hasattr(tokenizer, "get_added_vocab"):
        return tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer.encode(text)


def special_ids(tokenizer) -> set[int]:
    """Ids that a text must not have: all special ones but the unknown word's."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if token.special}
    return {*tokenizer.all_special_ids, *special} - {getattr(tokenizer, "unk_token_id", None)}


@pytest.fixture(scope="module")
def tokenizers(models):
    """Of every judge with a model here: as published (CLIP's own), or small."""
    found = {
        "open_clip": SimpleTokenizer(),
        "pickscore": AutoTokenizer.from_pretrained(models / "pickscore_processor"),
        "image_reward": AutoTokenizer.from_pretrained(models / "image_reward_tokenizer"),
        "unified_reward": AutoProcessor.from_pretrained(models / "unified_reward").tokenizer,
    }
    marks = AddedToken("<mark/>", special=True, normalized=True)
    found["pickscore"].add_special_tokens({"additional_special_tokens": [marks]})
    return found


@pytest.mark.parametrize("name", ["open_clip", "pickscore", "image_reward", "unified_reward"])
def test_a_tokenizer_reads_the_words_that_it_holds_special_as_text(tokenizers, name):
    tokenizer = tokenizers[name]
    special, words = special_ids(tokenizer), control_words(tokenizer)
    own = {
        tokenizer.decode([each]) if name != "open_clip" else tokenizer.decoder[each]
        for each in special
    }
    clean = getattr(tokenizer, "clean_fn", str)
    texts = [f"red {way(word)} blue" for word in own if len(word) > 1 for way in WAYS.values()]
    assert any(special & set(ids_of(tokenizer, text)) for text in texts)
    for text in texts:
        assert not special & set(ids_of(tokenizer, plain(text, words, clean))), text


@pytest.mark.parametrize("name", ["hps", "clip_score", "pickscore", "image_reward"])
def test_a_scorer_scores_a_prompt_as_the_text_that_it_is(models, name):
    """Once a word of its own tokenizer ended the prompt, whatever stood after it."""
    scorer = registry.load([name], models, section={})[name]
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    score = lambda prompt: scorer(image, [prompt]).item()
    ends = {"pickscore": "<|endoftext|>", "image_reward": "[SEP]"}.get(name, "<end_of_text>")
    asked = f"a red circle {ends} and a blue square"
    assert score(asked) == score(plain(asked, COMMON)) != score(f"a red circle {ends}")
