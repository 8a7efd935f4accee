"""The base of every typed setting, and how a mistake in one is put into words."""

from typing import ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Tag, ValidationError


class Settings(BaseModel):
    """Frozen and strict: an unknown key or a value of another type is an error.

    `how`: names of fields that say how a run is made, not what it makes; a resumed run may change them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    how: ClassVar[frozenset[str]] = frozenset()

    def deciding(self) -> dict[str, object]:
        """The fields that decide what a run makes, as JSON values."""
        return self.model_dump(mode="json", exclude=set(self.how))


def first_problem(error: ValidationError, schema: type[Settings]) -> str:
    """The first problem (an unknown key before others) of validating a `schema`, as `key.of.setting: what is wrong (got value)`, one line."""
    # a misspelt key explains a missing one
    problem = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    keys, allowed = _describe(schema, problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{'.'.join(keys)}: unknown key; allowed are {', '.join(allowed)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] not in ("value_error", "missing"):
        message += f" (got {str(problem['input'])[:60]!r})"
    return f"{'.'.join(keys)}: {message}" if keys else message


def _describe(schema, loc: tuple[str | int, ...]) -> tuple[list[str], list[str]]:
    """`loc` as the keys of the file, and the keys that the mapping with the last of them may have."""
    keys, allowed = [], []
    for part in loc:
        fields = getattr(schema, "model_fields", None)
        if fields is not None:
            allowed = list(fields)
            schema = fields[part].annotation if part in fields else None
            keys.append(str(part))
            continue
        tagged = [option for option in get_args(schema) if part in _tags(option)]
        if tagged:  # a union that its tag decides, which is no key of the file
            schema = getattr(tagged[0], "__origin__", tagged[0])
        else:
            schema = get_args(schema)[-1] if get_args(schema) else None
            keys.append(str(part))
    return keys, allowed


def _tags(option) -> tuple:
    if tags := [each.tag for each in getattr(option, "__metadata__", ()) if isinstance(each, Tag)]:
        return tuple(tags)
    fields = getattr(option, "model_fields", {})
    return get_args(fields["source"].annotation) if "source" in fields else ()
