from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field, model_validator

from cluster.errors import SpecError, UserError
from cluster.input.validation_errors import WrongValueError, prefix_field, validate_model


def even(value: int) -> int:
    if value % 2:
        raise WrongValueError(f"{value} is odd", "double it")
    return value


def known(word: str) -> str:
    if word != "blue":
        raise UserError(f"unknown colour {word!r}", "valid: blue")
    return word


class Wheel(BaseModel, extra="forbid"):
    spokes: Annotated[int, Field(strict=True, ge=1)] = 8
    colour: Annotated[str, AfterValidator(lambda word: prefix_field(known, word))] = "blue"


class Sail(BaseModel, extra="forbid"):
    area: float
    kind: Literal["square", "lateen"] = "square"


class Vehicle(BaseModel, extra="forbid"):
    name: str
    seats: Annotated[int, AfterValidator(even)] = 2
    wheels: list[Wheel] = []
    parts: dict[str, Wheel | Sail] = {}

    @model_validator(mode="after")
    def _fits(self) -> "Vehicle":
        if self.seats > 10 * (len(self.wheels) or 1):
            raise WrongValueError("too many for so few wheels", "add wheels", field="seats")
        return self


CASES = {
    "missing": ({}, "name", "is required", ""),
    "misspelt": ({"nme": "x"}, "nme", "unknown key 'nme'", "did you mean 'name'? valid: name, seats, wheels, parts"),
    "nested": ({"name": "x", "wheels": [{}, {"spoke": 1}]}, "wheels.1.spoke", "unknown key 'spoke'",
               "did you mean 'spokes'? valid: spokes, colour"),
    "type": ({"name": "x", "wheels": [{"spokes": "8"}]}, "wheels.0.spokes", "must be a valid integer, got '8'", ""),
    "bound": ({"name": "x", "wheels": [{"spokes": 0}]}, "wheels.0.spokes", "greater than or equal to 1, got 0", ""),
    "ours": ({"name": "x", "seats": 3}, "seats", "3 is odd", "double it"),
    "ours of a model": ({"name": "x", "seats": 12}, "seats", "too many for so few wheels", "add wheels"),
    "a user error": ({"name": "x", "wheels": [{"colour": "red"}]}, "wheels.0.colour", "unknown colour 'red'",
                     "valid: blue"),
    "in a union": ({"name": "x", "parts": {"a": {"area": 1, "kind": "squar"}}}, "parts.a.kind", "unknown value 'squar'",
                   "did you mean 'square'"),
    "a key of a union": ({"name": "x", "parts": {"seats": {"aera": 1}}}, "parts.seats.aera", "unknown key 'aera'",
                         "did you mean 'area'? valid: spokes, colour, area, kind"),
    "no mapping": ({"name": "x", "wheels": [3]}, "wheels.0", "must be a mapping, got 3", ""),
    "no list": ({"name": "x", "wheels": "no"}, "wheels", "must be a valid list, got 'no'", ""),
    "nothing at all": (None, "", "must be a mapping, got None", ""),
}  # fmt: skip


@pytest.mark.parametrize("data, field, message, remedy", CASES.values(), ids=CASES)
def test_an_error_names_field_value_and_remedy(data, field, message, remedy):
    with pytest.raises(SpecError) as refused:
        validate_model(Vehicle, data)
    assert refused.value.field == field
    assert message in refused.value.message
    assert refused.value.remedy.startswith(remedy)


def test_the_file_and_the_number_of_further_errors_are_told():
    with pytest.raises(SpecError, match=r"^seats: 3 is odd \(in car\.yaml\) \(and 2 more\); double it$"):
        validate_model(Vehicle, {"name": "x", "seats": 3, "wheels": [{"spokes": 0}, {"spokes": 0}]}, "car.yaml")


def test_a_misspelt_required_key_is_told_once():
    with pytest.raises(SpecError) as refused:
        validate_model(Vehicle, {"nmae": "x"})
    assert "more" not in str(refused.value)


def test_a_long_value_is_cut():
    with pytest.raises(SpecError) as refused:
        validate_model(Vehicle, {"name": "x", "wheels": "y" * 10_000})
    assert len(str(refused.value)) < 200


def test_what_is_right_is_returned():
    assert validate_model(Vehicle, {"name": "x", "wheels": [{}]}) == Vehicle(name="x", wheels=[Wheel()])
