"""Uploads an exported folder to a model hub."""

from pathlib import Path

from g2rpo_core.errors import TransientError, UserError


def check_repo(repo: str) -> None:
    """Checks, before any work, that the hub accepts the name and that there is a login; UserError otherwise."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"--push {repo}: not a repository name; give it as `user/name`") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push: HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError(
            "--push: you are not logged in to the hub: run `hf auth login`, or set HF_TOKEN to a token with write access"
        )


def push(folder: Path, repo: str, public: bool) -> str:
    """Uploads the folder and returns the commit's address; creates the repository if needed, private unless `public`.

    The hub is that of HF_ENDPOINT. UserError if it refuses, or if the repository is already public and `public` is not set;
    TransientError if it cannot be reached.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        created = api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.model_info(created.repo_id).private:
            raise UserError(f"--push {repo}: it already exists and everyone can see it: give --public, or another name")
        done = api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload by g2rpo export")
    except HfHubHTTPError as error:
        raise _explained(repo, api.endpoint, error.response.status_code) from None
    except (HTTPError, OSError) as error:  # its text may hold the request, and so the token
        raise TransientError(f"--push {repo}: {api.endpoint} cannot be reached ({type(error).__name__}): run it again") from None
    return done.commit_url


def _explained(repo: str, endpoint: str, status: int) -> UserError:
    if status in (401, 403):
        return UserError(f"--push {repo}: {endpoint} refuses ({status}): the token needs write access to it")
    if status >= 500 or status == 429:
        return TransientError(f"--push {repo}: {endpoint} answers {status}: run it again later")
    return UserError(f"--push {repo}: {endpoint} answers {status}")
