"""Score images from 1 to 5 by a vision-language model's answer to a question (UnifiedReward).

The questions are in templates/, word for word as UnifiedReward's authors publish them. Three
families are in use, and their scores are not interchangeable: `final_score` (the first models:
elements, then one score), `word_axes` (version 1.5: every word, then three scores) and `axes`
(version 2: three scores). The published inference scripts of
https://github.com/CodeGoat24/UnifiedReward hold them as point_score_image_generation and
point_score_ACS_image_generation. A change of wording becomes a new version; the old one stays.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import transformers
from pydantic import Field, model_validator

from g2rpo_core.foundation.errors import UserError
from g2rpo_core.foundation.settings import Count
from g2rpo_core.hub.pretrained import load_whole, with_vocabulary
from g2rpo_core.rewards.limits import LONGEST_TEXT
from g2rpo_core.rewards.plain_text import COMMON, control_words, plain
from g2rpo_core.rewards.preprocess import Images, check_pairs, eight_bit, transforms
from g2rpo_core.rewards.remote import HttpClient, Unanswered
from g2rpo_core.rewards.reward_protocol import as_png
from g2rpo_core.rewards.spec import (
    Connections,
    ModelSize,
    RewardServerSettings,
    RewardSettings,
    RewardSpec,
    RewardWithReasons,
    ServerSettings,
)

FOLDER = Path(__file__).parent / "templates"
AXES = ("Alignment Score (1-5):", "Coherence Score (1-5):", "Style Score (1-5):")
# Name -> the labels of its scores
TEMPLATES = {"final_score.v1": ("Final Score:",), "word_axes.v1": AXES, "axes.v1": AXES}
LOWEST, HIGHEST = 1.0, 5.0
FAMILIES = ("qwen2_5_vl", "llava_onevision")
Answers = list[str | Exception]  # an answer, or why there is none
Ask = Callable[[Sequence[torch.Tensor], Sequence[str]], Answers]  # images [3, H, W] uint8


class UnifiedRewardServerSettings(RewardServerSettings):
    """A score server or, with `model`, a server with OpenAI's chat completions."""

    model: str | None = Field(
        None,
        description=(
            "Model of a server with OpenAI's chat completions, whose url ends in the API's "
            "version, such as http://localhost:8000/v1."
        ),
    )
    concurrency: Connections = Field(
        16, description="Concurrent requests; such servers batch them."
    )

    @model_validator(mode="after")
    def _of_one_kind(self):
        score_only = RewardServerSettings.model_fields.keys() - ServerSettings.model_fields.keys()
        if self.model is not None and (wrong := sorted(score_only & self.model_fields_set)):
            raise ValueError(
                f"{wrong[0]} is a setting of score servers; a chat completions server, "
                "which has a model, does not take it"
            )
        return self


class UnifiedRewardSettings(RewardSettings):
    """How UnifiedReward is asked."""

    micro_batch: Count = Field(16, description="Images per call of the model.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Dtype of weights and computation; `auto`: that of the files."
    )
    template: Literal["final_score.v1", "word_axes.v1", "axes.v1"] = Field(
        "final_score.v1", description="Question template; it must match the model."
    )
    max_new_tokens: Count = Field(
        512, description="Longest answer in tokens; a longer one has no score."
    )
    server: UnifiedRewardServerSettings | None = Field(
        None, description="Server of the model; null: a model in this process."
    )

    @property
    def score_server(self) -> RewardServerSettings | None:
        return self.server if self.server is not None and self.server.model is None else None


DEFAULT = UnifiedRewardSettings()


def read_template(template: str) -> str:
    """Return the text of a template, which contains `{prompt}` once, for the caption."""
    return (FOLDER / f"{template}.txt").read_text(encoding="utf-8").removesuffix("\n")


def question(template: str, prompt: str) -> str:
    """Return the question about an image that was made for `prompt`, which is text and no more."""
    return read_template(template).replace("{prompt}", plain(prompt, COMMON))


def parse(template: str, answer: str) -> float:
    """Return the score in [1, 5]: the number after the template's label, or the mean of its three.

    ValueError, saying what is wrong, unless every label appears exactly once, followed by only a
    number from 1 to 5.
    """
    values = []
    for label in TEMPLATES[template]:
        if (count := answer.count(label)) != 1:
            raise ValueError(f"{label!r} appears {count} times instead of once")
        rest = answer.partition(label)[2].split("\n", 1)[0].strip()
        if not re.fullmatch(r"\d+(\.\d+)?", rest, re.ASCII) or not LOWEST <= float(rest) <= HIGHEST:
            raise ValueError(f"{rest[:40]!r} after {label!r} instead of a number from 1 to 5")
        values.append(float(rest))
    return sum(values) / len(values)


def conversation(text: str) -> list[dict]:
    """Return an image and a question about it in the form of chat templates."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def control_words_of(processor) -> re.Pattern[str]:
    """Return the control words of a processor's tokenizer, and what stands for images in a text."""
    placeholders = (getattr(processor, f"{kind}_token", None) for kind in ("image", "video"))
    return control_words(processor.tokenizer, *placeholders)


class UnifiedReward(RewardWithReasons):
    """score(images, prompts) -> [N] float32 in [1, 5], NaN where a score is missing.

    Images are rounded to 8 bits, as in files.
    """

    def __init__(self, ask: Ask, template: str):
        self.ask, self.template = ask, template

    def score_with_reasons(
        self, images: Images, prompts: Sequence[str]
    ) -> tuple[torch.Tensor, list[str | None]]:
        """Return scores [N], and for each NaN the failure, or what is wrong with the answer."""
        check_pairs(images, prompts)
        answers = self.ask(
            eight_bit(images), [question(self.template, prompt) for prompt in prompts]
        )
        scores, reasons = zip(*(self._read(answer) for answer in answers))
        return torch.tensor(scores), list(reasons)

    def _read(self, answer: str | Exception) -> tuple[float, str | None]:
        if isinstance(answer, Exception):
            return float("nan"), f"no answer: {answer}"
        try:
            return parse(self.template, answer), None
        except ValueError as error:
            reason = f"not a score: {error}; the answer was {answer!r}"
            return float("nan"), reason[:LONGEST_TEXT]


class InProcess:
    """Ask a model in this process, greedily.

    folder: of a transformers model of one of FAMILIES; micro_batch: questions in one call.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        micro_batch: int,
        max_new_tokens: int,
        dtype: str = "auto",
    ):
        model_type = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True
        ).model_type
        if model_type not in FAMILIES:
            raise UserError(
                f"{folder}: is a model of type {model_type!r}, but only {', '.join(FAMILIES)} can "
                "run in this process; serve it and set rewards.unified_reward.server"
            )
        # Straight onto the device: each process of a node would hold all weights on the host at the
        # same time
        self.model = load_whole(
            transformers.AutoModelForImageTextToText,
            folder,
            dtype=dtype,
            local_files_only=True,
            device_map=device,
        )
        self.model.eval().requires_grad_(False).to(device)
        self.processor = with_vocabulary(
            transformers.AutoProcessor.from_pretrained(folder, local_files_only=True), folder
        )
        self.processor.tokenizer.padding_side = "left"
        self.words = control_words_of(self.processor)
        self.micro_batch, self.max_new_tokens = micro_batch, max_new_tokens

    @torch.no_grad()
    def __call__(self, images: Sequence[torch.Tensor], questions: Sequence[str]) -> Answers:
        answers = []
        for start in range(0, len(images), self.micro_batch):
            part = slice(start, start + self.micro_batch)
            texts = [
                self.processor.apply_chat_template(
                    conversation(plain(text, self.words)),
                    add_generation_prompt=True,
                    tokenize=False,
                )
                for text in questions[part]
            ]
            inputs = self.processor(
                text=texts,
                images=[[image] for image in images[part]],
                padding=True,
                return_tensors="pt",
            )
            inputs = inputs.to(self.model.device, self.model.dtype)
            made = self.model.generate(
                **inputs,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
            )
            answers += self.processor.batch_decode(
                made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
        return answers


class ChatServer:
    """ask(N images, N questions) -> N answers in order.

    Unanswered stands where every try failed. UserError if the server refuses every request: wrong
    key, model or address.
    """

    def __init__(self, settings: ServerSettings, model: str, max_new_tokens: int):
        self.model, self.max_new_tokens = model, max_new_tokens
        where = "rewards.unified_reward.server"
        self.client = HttpClient(settings, where, f" with model {model!r}")

    def __call__(self, images: Sequence[torch.Tensor], questions: Sequence[str]) -> Answers:
        return self.client.together(self._ask, images, questions)

    def _ask(self, image: torch.Tensor, question: str) -> str | Exception:
        url = as_png(transforms().to_pil_image(image))
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
        }
        try:
            return self._read(self.client.request("/chat/completions", body))
        except Unanswered as error:
            return error

    def _read(self, said: str) -> str:
        try:
            choice = json.loads(said)["choices"][0]
            text, finished = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Unanswered(f"not a chat completion: {said[:200]!r}") from None
        if not isinstance(text, str):
            raise Unanswered("an answer without text")
        if finished == "length":
            raise Unanswered(f"cut at max_new_tokens {self.max_new_tokens}: {text[-200:]!r}")
        return text


def unified_reward(
    folder: Callable[[], Path], device: torch.device, settings: UnifiedRewardSettings
) -> UnifiedReward:
    """Load UnifiedReward from its model's folder, or, without calling `folder`, for a server."""
    if settings.server is not None and settings.server.model is not None:
        return UnifiedReward(
            ChatServer(settings.server, settings.server.model, settings.max_new_tokens),
            settings.template,
        )
    ask = InProcess(folder(), device, settings.micro_batch, settings.max_new_tokens, settings.dtype)
    return UnifiedReward(ask, settings.template)


# Qwen2.5-VL-7B in bfloat16, as the files are. An image of 1024² has 1,369 tokens, question and
# answer some 900: keys and values of 28 layers (57 KB per token) and, in the prefill, two states of
# its MLP (76 KB per token). Two operations per parameter and token.
QWEN_7B = ModelSize(
    8_292_166_656,
    2_270 * (57_344 + 75_776),
    2 * 8.29e9 * 2_270,
    width=2,
    at_once=DEFAULT.micro_batch,
)

SPEC = RewardSpec(
    "unified_reward",
    "UnifiedReward",
    lambda models, device, settings: unified_reward(
        lambda: models.folder("unified_reward"), device, settings
    ),
    settings=UnifiedRewardSettings,
    models=("unified_reward",),
    size=QWEN_7B,
)
