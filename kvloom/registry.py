"""Registry: name -> class, with text options turned into typed, checked fields.

A method is a frozen keyword-only dataclass with a registered name. `Registry.build("infoflow", {"ratio": "0.15"})`
converts each option to its field's type (pydantic in lax mode, so text works), and refuses what it does not know.
Packages outside kvloom add methods through entry points (group ``kvloom.selectors`` and so on).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, get_type_hints

from kvloom.errors import MethodError

T = TypeVar("T")


class Registry(Mapping[str, type[T]], Generic[T]):
    """A mapping from the names of methods to their classes. `kind` names them in messages: "selector"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}
        self._entry_points_loaded = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Registers the decorated class under `name` and returns it; a name taken is a ``ValueError``."""

        def decorate(cls: type[T]) -> type[T]:
            if name in self._classes:
                raise ValueError(f"{self.kind} {name!r} is already registered as {self._classes[name].__qualname__}")
            self._classes[name] = cls
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return decorate

    def _load_entry_points(self) -> None:
        if not self._entry_points_loaded:
            self._entry_points_loaded = True
            for entry_point in entry_points(group=f"kvloom.{self.kind}s"):
                entry_point.load()

    def __getitem__(self, name: str) -> type[T]:
        self._load_entry_points()
        if name not in self._classes:
            raise MethodError(f"unknown {self.kind} {name!r}{did_you_mean(name, self._classes)}")
        return self._classes[name]

    def __contains__(self, name: object) -> bool:
        self._load_entry_points()
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(sorted(self._classes))

    def __len__(self) -> int:
        self._load_entry_points()
        return len(self._classes)

    def build(self, name: str, options: Mapping[str, Any] | None = None) -> T:
        """An instance of `name` with `options`, each text or already of the field's type.

        Raises ``MethodError`` for an unknown name or option and for a value that does not fit.
        """
        cls = self[name]
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for option, value in (options or {}).items():
            if option not in fields:
                raise MethodError(f"{self.kind} {name!r} has no option {option!r}{did_you_mean(option, fields)}")
            values[option] = _convert(f"{name}: option {option}", value, hints[option])
        return cls(**values)


def _convert(what: str, value: Any, hint: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        if isinstance(value, str) and value[:1] in "[{":
            try:
                return TypeAdapter(hint).validate_json(value)
            except ValidationError:
                pass
        reason = error.errors()[0]["msg"]
        raise MethodError(f"{what}: {json.dumps(value, default=str)} will not do: {_decapitalize(reason)}") from None


def _decapitalize(text: str) -> str:
    return text[:1].lower() + text[1:]


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, list(known), n=1)
    listing = ", ".join(sorted(known))
    return f"; did you mean {near[0]!r}?" if near else f"; there are: {listing}" if listing else ""


def parse_options(texts: list[str]) -> dict[str, str]:
    """``["ratio=0.15"]`` as a dict; raises ``MethodError`` for a text without ``=`` or a name given twice."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise MethodError(f"option {text!r} is not of the form NAME=VALUE, for example ratio=0.15")
        if name.strip() in options:
            raise MethodError(f"option {name.strip()!r} is given twice")
        options[name.strip()] = value.strip()
    return options
