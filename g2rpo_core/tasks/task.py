"""Define a task: captioned images that can be drawn, and checked against their captions exactly."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch


class Scene(Protocol):
    """What an image shows; equal scenes have equal captions."""

    @property
    def caption(self) -> str:
        """Return a text that names every attribute of the scene."""

    @property
    def style(self) -> str:
        """Return the group that its prompt is reported under."""


S = TypeVar("S", bound=Scene)


class Task(ABC, Generic[S]):
    """A synthetic task: how scenes are drawn at random, captioned, painted and checked."""

    size: int
    """Side of the square images, in pixels."""
    colors: Mapping[str, tuple[int, int, int]]
    """Name -> RGB of everything that is painted."""
    kinds: Mapping[str, Collection[str]]
    """Kind of attribute -> its words; those of the last kind may be phrases."""
    other_words: Sequence[str]
    """Words of captions that name no attribute."""
    styles: Sequence[str]
    """Every style that a scene can have."""
    example: str
    """A caption to show to users."""

    @abstractmethod
    def random_scene(self, rng: np.random.Generator) -> S:
        """Draw a scene with uniform attributes."""

    @abstractmethod
    def changed(self, scene: S, rng: np.random.Generator) -> S | None:
        """Draw one attribute of `scene` again; None if the result is no scene of this task."""

    @abstractmethod
    def all_scenes(self, style: str) -> tuple[S, ...]:
        """Return every scene of a style."""

    @abstractmethod
    def parse(self, caption: str) -> S:
        """Parse a caption, the inverse of `Scene.caption`; ValueError if no scene has it."""

    @abstractmethod
    def elements(self, scene: S) -> list[tuple[str, str]]:
        """List what the scene's caption asks for, as (word, kind), in the order of the text."""

    @abstractmethod
    def draw(self, scene: S, rng: np.random.Generator | None = None) -> np.ndarray:
        """Paint an image [3, size, size], float32 in [0, 1]; rng: for what captions leave open."""

    @abstractmethod
    def attributes(self, images: torch.Tensor, scenes: Sequence[S]) -> list[dict[str, bool]]:
        """Check each image [N, 3, size, size] in [0, 1] for its scene's attributes, by name."""

    def neighbour(self, scene: S, rng: np.random.Generator) -> S:
        """Change one attribute of `scene`."""
        while True:
            other = self.changed(scene, rng)
            if other is not None and other != scene:
                return other

    def sample(self, count: int, seed: int, *, testing: bool) -> tuple[list[S], np.ndarray]:
        """Draw `count` scenes, captions may repeat, and images [count, 3, size, size].

        testing: as in `distinct_scenes`.
        """
        rng = np.random.default_rng(seed)
        scenes: list[S] = []
        while len(scenes) < count:
            scene = self.random_scene(rng)
            if held_out(scene.caption) == testing:
                scenes.append(scene)
        return scenes, np.stack([self.draw(scene, rng) for scene in scenes])

    def distinct_scenes(
        self, count: int, seed: int, *, testing: bool, without: Collection[str] = ()
    ) -> list[S]:
        """Draw `count` different scenes: held-out captions if `testing`, else others.

        None of `without` is drawn. The styles have equal shares, or as many scenes as there are.
        ValueError if there are fewer captions of that kind.
        """
        rng = np.random.default_rng(seed)
        fits = lambda caption: held_out(caption) == testing and caption not in without
        pools = [
            [scene for scene in self.all_scenes(style) if fits(scene.caption)]
            for style in self.styles
        ]
        sizes: list[int] = []
        for left, pool in zip(
            range(len(pools), 0, -1), pools
        ):  # what a small pool lacks, the later ones give
            wanted = count - sum(sizes)
            sizes.append(wanted if left == 1 else min(wanted // left, len(pool)))
        if sizes[-1] > len(pools[-1]):
            raise ValueError(
                f"this task has no {count} different {'held-out' if testing else 'training'} "
                "captions"
            )
        chosen = [
            pool[index]
            for pool, size in zip(pools, sizes)
            for index in rng.permutation(len(pool))[:size]
        ]
        return [chosen[index] for index in rng.permutation(count)]

    def verify(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Return the share of asked attributes held, [N] float32 in [0, 1].

        images: [N, 3, size, size] float in [0, 1]; prompts: N captions (ValueError otherwise).
        """
        if images.shape[1:] != (3, self.size, self.size) or len(images) != len(prompts):
            raise ValueError(
                f"need one prompt per image [N, 3, {self.size}, {self.size}], "
                f"got {tuple(images.shape)} and {len(prompts)} prompts"
            )
        results = self.attributes(images.float().cpu(), [self.parse(prompt) for prompt in prompts])
        return torch.tensor([sum(held.values()) / len(held) for held in results])

    @property
    def phrases(self) -> list[str]:
        """Return all words and phrases that captions are made of."""
        return [*self.other_words, *(word for words in self.kinds.values() for word in words)]


def held_out(caption: str) -> bool:
    """Return whether a caption, by checksum, is in the quarter that no model is trained on."""
    return zlib.crc32(caption.encode()) % 4 == 0
