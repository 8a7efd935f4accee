"""Settings for servers: chat completions servers and score servers."""

from typing import Annotated, Literal

from pydantic import Field

from g2rpo_core.settings import Count, Settings

Connections = Annotated[int, Field(gt=0, le=10_000)]


class ServerSettings(Settings):
    """A server that a reward asks.

    timeout: seconds for one try; tries: of each request; backoff: seconds before the second try, doubled before each further
    one, and up to as many more at random; concurrency: open requests at once; key_variable: the environment variable that
    holds the server's key.
    """

    url: str = Field(pattern=r"^https?://\S+$")
    timeout: float = Field(120, gt=0, le=86_400)
    tries: int = Field(5, gt=0, le=1000)
    backoff: float = Field(1.0, ge=0, le=3600)
    concurrency: Connections = 16
    key_variable: str | None = None


class RewardServerSettings(ServerSettings):
    """A score server, such as `g2rpo serve-reward` (docs/reward_servers.md).

    url: the address to which /health and /score are added. reward: its name on the server, None: the same name; version: the
    required one, None: any; images: how tensors are sent, float32 exactly as they are, or png rounded to 8 bits, as files hold
    them.
    """

    concurrency: Connections = 4  # the server scores requests one after the other; each holds its images in memory
    reward: str | None = None
    version: str | None = None
    max_images_per_request: Count = 8
    images: Literal["float32", "png"] = "float32"
