"""Checks params.yaml, its profile and its prompt files before any work; `python -m stages.check`."""

from g2rpo_core.config import load_profile, load_run, profile_path
from g2rpo_core.data.embeddings import check_lengths
from stages.common import ends_in_one_line
from stages.prompts import chosen_prompts


@ends_in_one_line
def main() -> None:
    run = load_run()
    profile = load_profile(profile_path(run.profile))
    on_disk = all(isinstance(source, str) for source in (profile.prompts.train, profile.prompts.test))
    train, test = chosen_prompts(profile.prompts)[:2] if on_disk else ([], [])  # a data set is for the stage `prompts` to fetch
    if profile.models.source == "shapes":
        from g2rpo_core.tiny_models.tokenizers import t5_tokenizer

        check_lengths([*train, *test], t5_tokenizer(), profile.embed.max_sequence_length)
    print(f"profile {run.profile}: {', '.join(run.methods)} with seeds {', '.join(map(str, run.seeds))}")


if __name__ == "__main__":
    main()
