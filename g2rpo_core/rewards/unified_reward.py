"""UnifiedReward: asks a vision-language model about each image, and reads its answer as a score from 1 to 5."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator

from g2rpo_core.common.model_store import ModelStore
from g2rpo_core.errors import UserError
from g2rpo_core.rewards.chat_server import ChatServer
from g2rpo_core.rewards.preprocess import Images, check_pairs, eight_bit
from g2rpo_core.rewards.server_settings import Connections, RewardServerSettings, ServerSettings
from g2rpo_core.rewards.spec import ModelSize, RewardSettings, RewardSpec
from g2rpo_core.rewards.templates import parse, question
from g2rpo_core.settings import Count

FAMILIES = ("qwen2_5_vl", "llava_onevision")
Answers = list[str | Exception]  # an answer, or why there is none


class UnifiedRewardServerSettings(RewardServerSettings):
    """model: of a server with OpenAI's chat completions, whose url ends in the API's version, as in http://localhost:8000/v1.

    Without a model, it is a score server.
    """

    model: str | None = None
    concurrency: Connections = 16  # such servers batch requests that arrive together

    @model_validator(mode="after")
    def _of_one_kind(self):
        of_scores = RewardServerSettings.model_fields.keys() - ServerSettings.model_fields.keys()
        if self.model is not None and (wrong := sorted(of_scores & self.model_fields_set)):
            raise ValueError(
                f"{wrong[0]} is a setting of score servers; a chat completions server, which has a model, does not take it"
            )
        return self


class UnifiedRewardSettings(RewardSettings):
    """template: the family of questions (see `templates`), which must fit the model; server: where to ask, None: in this process.

    dtype: auto means that of the model's files.
    """

    micro_batch: Count = Field(16, description="images in one call of the model")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    template: Literal["final_score.v1", "word_axes.v1", "axes.v1"] = "final_score.v1"
    max_new_tokens: Count = Field(512, description="of an answer; a longer one has no score")
    server: UnifiedRewardServerSettings | None = None

    @property
    def score_server(self) -> RewardServerSettings | None:
        return self.server if self.server is not None and self.server.model is None else None


DEFAULT = UnifiedRewardSettings()


def conversation(text: str) -> list[dict]:
    """One image and a question about it, in the form of chat templates."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


class UnifiedReward:
    """score(images, prompts) -> [N] float32 in [1, 5], NaN where a score is missing; `score_with_reasons` also says why.

    ask: N images [3, H, W] uint8 and N questions -> their answers. Images have 8 bits, as in files.
    """

    def __init__(self, ask: Callable[[list[torch.Tensor], Sequence[str]], Answers], template: str):
        self.ask, self.template = ask, template

    def __call__(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        return self.score_with_reasons(images, prompts)[0]

    def score_with_reasons(self, images: Images, prompts: Sequence[str]) -> tuple[torch.Tensor, list[str | None]]:
        """Scores [N], and the reason for each that is NaN: what is wrong with the answer, with its text, or the failure."""
        check_pairs(images, prompts)
        answers = self.ask(eight_bit(images), [question(self.template, prompt) for prompt in prompts])
        scores, reasons = zip(*(self._read(answer) for answer in answers))
        return torch.tensor(scores), list(reasons)

    def _read(self, answer: str | Exception) -> tuple[float, str | None]:
        if isinstance(answer, Exception):
            return float("nan"), f"no answer: {answer}"
        try:
            return parse(self.template, answer), None
        except ValueError as error:
            return float("nan"), f"not a score: {error}; the answer was {answer!r}"


class InProcess:
    """Asks a model in this process, greedily: a transformers folder of one of FAMILIES.

    dtype: a name, or `auto` for its files'.
    """

    def __init__(self, folder: Path, device: torch.device, micro_batch: int, max_new_tokens: int, dtype: str = "auto"):
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

        model_type = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
        if model_type not in FAMILIES:
            raise UserError(
                f"{folder}: is a model of type {model_type!r}, but only {', '.join(FAMILIES)} can run in this process; "
                "serve it and set rewards.unified_reward.server"
            )
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model.eval().requires_grad_(False).to(device)
        self.processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.processor.tokenizer.padding_side = "left"
        self.micro_batch, self.max_new_tokens = micro_batch, max_new_tokens

    @torch.no_grad()
    def __call__(self, images: list[torch.Tensor], questions: Sequence[str]) -> Answers:
        answers = []
        for start in range(0, len(images), self.micro_batch):
            part = slice(start, start + self.micro_batch)
            texts = [
                self.processor.apply_chat_template(conversation(text), add_generation_prompt=True, tokenize=False)
                for text in questions[part]
            ]
            inputs = self.processor(text=texts, images=images[part], padding=True, return_tensors="pt")
            inputs = inputs.to(self.model.device, self.model.dtype)
            made = self.model.generate(
                **inputs, max_new_tokens=self.max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None
            )
            answers += self.processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answers


def unified_reward(folder: Callable[[], Path], device: torch.device, settings: UnifiedRewardSettings) -> UnifiedReward:
    """UnifiedReward from the folder of its model, or from the chat server in the settings (then `folder` is not called)."""
    if settings.server is not None and settings.server.model is not None:
        return UnifiedReward(ChatServer(settings.server, settings.server.model, settings.max_new_tokens), settings.template)
    ask = InProcess(folder(), device, settings.micro_batch, settings.max_new_tokens, settings.dtype)
    return UnifiedReward(ask, settings.template)


def _build(models: ModelStore, device: torch.device, settings: UnifiedRewardSettings) -> UnifiedReward:
    return unified_reward(lambda: models.folder("unified_reward"), device, settings)


# Qwen2.5-VL-7B in bfloat16, as the files are. One image of 1024² is 1,369 tokens beside some 900 of question and answer: keys and values of
# 28 layers (57 KB a token) and, in the prefill, two states of its MLP (76 KB a token). Two operations a parameter for each token.
QWEN_7B = ModelSize(8_292_166_656, 2_270 * (57_344 + 75_776), 2 * 8.29e9 * 2_270, width=2, at_once=DEFAULT.micro_batch)

SPEC = RewardSpec(
    "unified_reward", "UnifiedReward", _build, settings=UnifiedRewardSettings, models=("unified_reward",), size=QWEN_7B
)  # fmt: skip
