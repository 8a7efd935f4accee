"""Settings for servers: chat completions servers and score servers."""

from typing import Annotated, Literal

from pydantic import Field

from g2rpo_core.settings import Count, Settings

Connections = Annotated[int, Field(gt=0, le=10_000)]


class ServerSettings(Settings):
    """A server that a reward asks.

    timeout: seconds for one try; tries: of each request; backoff: seconds before the second try, doubled before each further = Field(description='seconds for one try')
    one, and up to as many more at random; concurrency: open requests at once; key_variable: the environment variable that
    holds the server's key.
    """

    url: str = Field(pattern=r"^https?://\S+$", description="the server's address")
    timeout: float = Field(120, gt=0, le=86_400)
    tries: int = Field(5, gt=0, le=1000, description="of each request")
    backoff: float = Field(1.0, ge=0, le=3600, description="seconds before the second try, doubled before each further one")
    concurrency: Connections = Field(16, description="requests under way at once")
    key_variable: str | None = Field(None, description="the environment variable with the server's key")


class RewardServerSettings(ServerSettings):
    """A score server, such as `g2rpo serve-reward` (docs/reward_servers.md).

    url: the address to which /health and /score are added. reward: its name on the server, None: the same name; version: the
    required one, None: any; images: how tensors are sent, float32 exactly as they are, or png rounded to 8 bits, as files hold
    them.
    """

    concurrency: Connections = Field(
        4, description="requests under way at once; the server scores one after the other, and each holds its images in memory"
    )
    reward: str | None = Field(None, description="its name at the server; null: the name here")
    version: str | None = Field(None, description="that the server must have; null: any")
    max_images_per_request: Count = Field(8, description="images in one request")
    images: Literal["float32", "png"] = Field("float32", description="how tensors are sent: exactly, or rounded to 8 bits")
