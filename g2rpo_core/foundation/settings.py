"""Base class of all typed settings, their ranges, and readable messages for mistakes in them."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from g2rpo_core.foundation.errors import UserError

Count = Annotated[int, Field(gt=0, le=10**9)]
Pixels = Annotated[int, Field(gt=0, le=2**14)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Scale = Annotated[float, Field(gt=0, le=1e9)]
Rate = Annotated[float, Field(gt=0, le=1.0, description="Learning rate.")]


def _named(value: str) -> str:
    if problem := name_problem(value):
        raise ValueError(problem)
    return value


def _different(values: Sequence) -> Sequence:
    if twice := next(
        (value for index, value in enumerate(values) if value in values[:index]), None
    ):
        raise ValueError(f"must be different from each other ({twice} appears twice)")
    return values


def name_problem(name: str) -> str | None:
    """Say what is wrong with a name that will name a file or folder; None if nothing is."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) and ".." not in name:
        return None
    return (
        "is not a valid name: at most 100 letters, digits, _, - and ., and not .. "
        f"(got {name[:60]!a})"
    )


def checked_name(name: str, where: str) -> str:
    """Return `name` if it may name a file; else UserError: no name may lead out of its folder."""
    if problem := name_problem(name):
        raise UserError(f"{where}: {problem}")
    return name


# Of a run, profile, study or reward: names files and columns
Name = Annotated[str, AfterValidator(_named)]
Different = AfterValidator(_different)


def _without_dot(value: str) -> str:
    if "." in value:
        raise ValueError(f"must have no dot, at which DVC would split it (got {value!r})")
    return value


# Of an entry of `methods`: DVC looks its settings up by it
EntryName = Annotated[Name, AfterValidator(_without_dot)]


class Settings(BaseModel):
    """Frozen and strict: unknown keys, other types and numbers that are not finite are errors.

    `how`: names of fields that change how a run is computed, but not its result; a resumed run may
    change them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    how: ClassVar[frozenset[str]] = frozenset()

    def deciding(self) -> dict[str, object]:
        """Return the fields that decide the result of a run, as JSON values."""
        return self.model_dump(mode="json", exclude=set(self.how))


def do_not_fit(problems: Sequence[str]) -> PydanticCustomError:
    """Return the error of a validator that found several problems; `problems_of` lists them."""
    return PydanticCustomError("do_not_fit", "do not fit together", {"problems": list(problems)})


def problems_of(
    error: ValidationError, schema: type[Settings], lines: Mapping[str, str] | None = None
) -> list[str]:
    """List every problem of validating a `schema`, as `key.of.setting: what is wrong (got value)`.

    Unknown keys come first, because a misspelt key explains a missing one. lines: the `file:line`
    of each key.
    """
    found = []
    for problem in sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden"):
        if problem["type"] == "do_not_fit":
            found += problem["ctx"]["problems"]
            continue
        keys, allowed = _describe(schema, problem["loc"])
        key = ".".join(keys)
        where = f" at {lines[key]}" if lines and key in lines else ""
        if problem["type"] == "extra_forbidden":
            found.append(f"{key}: unknown key; allowed are {', '.join(allowed)}{where}")
            continue
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] not in ("value_error", "missing"):
            message += f" (got {str(problem['input'])[:60]!r})"
        found.append(f"{key}: {message}{where}" if keys else message)
    return found


def _describe(schema, loc: tuple[str | int, ...]) -> tuple[list[str], list[str]]:
    """Return `loc` as keys of the file, and the keys that are allowed next to the last of them."""
    keys, allowed = [], []
    for part in loc:
        fields = getattr(schema, "model_fields", None)
        if fields is not None:
            allowed = [field.alias or name for name, field in fields.items()]
            schema = fields[part].annotation if part in fields else None
            keys.append(str(part))
            continue
        tagged = [option for option in get_args(schema) if part in _tags(option)]
        if tagged:  # a tagged union, whose tag is not a key of the file
            schema = getattr(tagged[0], "__origin__", tagged[0])
        else:
            schema = get_args(schema)[-1] if get_args(schema) else None
            keys.append(str(part))
    return keys, allowed


def _tags(option) -> tuple:
    if tags := [each.tag for each in getattr(option, "__metadata__", ()) if isinstance(each, Tag)]:
        return tuple(tags)
    literals = [
        field.annotation
        for field in getattr(option, "model_fields", {}).values()
        if get_origin(field.annotation) is Literal
    ]
    return tuple(value for literal in literals for value in get_args(literal))
