"""The base of every typed setting, and how a mistake in one is put into words."""

from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """Frozen and strict: an unknown key or a value of another type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def first_problem(error: ValidationError, kind: type[Settings]) -> str:
    """The first problem (an unknown key before others) of validating a `kind`, as `key.of.setting: what is wrong (got value)`, one line."""
    problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a misspelt key explains a missing one
    keys, allowed = _describe(kind, problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{'.'.join(keys)}: unknown key; allowed are {', '.join(allowed)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] not in ("value_error", "missing"):
        message += f" (got {str(problem['input'])[:60]!r})"
    return f"{'.'.join(keys)}: {message}" if keys else message


def _describe(kind, loc: tuple[str | int, ...]) -> tuple[list[str], list[str]]:
    """`loc` as the keys of the file, and the keys that the mapping with the last of them may have."""
    keys, allowed = [], []
    for part in loc:
        fields = getattr(kind, "model_fields", None)
        if fields is not None:
            allowed = list(fields)
            kind = fields[part].annotation if part in fields else None
            keys.append(str(part))
            continue
        tagged = [option for option in get_args(kind) if part in _tags(option)]
        if tagged:  # a union that is told apart by its tag, which is no key of the file
            kind = tagged[0]
        else:
            kind = get_args(kind)[-1] if get_args(kind) else None
            keys.append(str(part))
    return keys, allowed


def _tags(option) -> tuple:
    fields = getattr(option, "model_fields", {})
    return get_args(fields["source"].annotation) if "source" in fields else ()
