"""Registry: name -> class, with text options turned into typed, checked fields.

A method is a frozen keyword-only dataclass with a registered name. `Registry.build` converts each option, as
in ``{"ratio": "0.15"}``, to its field's type (pydantic in lax mode, so text works), and refuses what it does
not know.
Packages outside kvloom add methods through entry points (group ``kvloom.selectors`` and so on).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar, get_type_hints

from kvloom.errors import MethodError

T = TypeVar("T")
C = TypeVar("C", bound=type[Any])  # not type[T]: the decorated name keeps its own class


class _UnknownName(MethodError, KeyError):
    """Also a ``KeyError``, which is what `Mapping.get` turns into its default."""

    __str__ = Exception.__str__  # that of KeyError puts the message in quotes


class Registry(Mapping[str, type[T]], Generic[T]):
    """A mapping from the names of methods to their classes. `kind` names them in messages: "selector"."""

    def __init__(self, kind: str, package: str | None = None) -> None:
        """Imports every module of `package` on first use, so that a file is registered by being there."""
        self.kind = kind
        self._package = package
        self._classes: dict[str, type[T]] = {}
        self._is_loaded = False

    def register(self, name: str) -> Callable[[C], C]:
        """Registers the decorated class under `name` and returns it; a name taken is a ``ValueError``."""

        def decorate(cls: C) -> C:
            if name in self._classes:
                taken = self._classes[name].__qualname__
                raise ValueError(f"{self.kind} {name!r} is already registered as {taken}")
            self._classes[name] = cls  # type: ignore[assignment]
            cls.name = name
            return cls

        return decorate

    def _load(self) -> None:
        if self._is_loaded:
            return
        if self._package is not None:
            for module in iter_modules(import_module(self._package).__path__):
                import_module(f"{self._package}.{module.name}")
        for entry_point in entry_points(group=f"kvloom.{self.kind}s"):
            entry_point.load()
        self._is_loaded = True

    def __getitem__(self, name: str) -> type[T]:
        self._load()
        if name not in self._classes:
            raise _UnknownName(f"unknown {self.kind} {name!r}{did_you_mean(name, self._classes)}")
        return self._classes[name]

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._classes))

    def __len__(self) -> int:
        self._load()
        return len(self._classes)

    def build(self, name: str, options: Mapping[str, Any] | None = None) -> T:
        """An instance of `name` with `options`, each text or already of the field's type.

        Raises ``MethodError`` for an unknown name or option and for a value that does not fit.
        """
        cls = self[name]
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for option, value in (options or {}).items():
            if option not in fields:
                near = did_you_mean(option, fields)
                raise MethodError(f"{self.kind} {name!r} has no option {option!r}{near}")
            values[option] = _convert(f"{name}: option {option}", value, hints[option])
        for option, field in fields.items():
            is_required = field.default is field.default_factory is dataclasses.MISSING
            if is_required and option not in values:
                raise MethodError(f"{self.kind} {name!r} needs the option {option!r}: {option}=VALUE")
        try:
            return cls(**values)
        except MethodError:
            raise
        except ValueError as error:
            raise MethodError(f"{name}: {error}") from error


def _convert(what: str, value: Any, hint: Any) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        fault = error
        if isinstance(value, str) and value[:1] in "[{":
            try:
                return TypeAdapter(hint).validate_json(value)
            except ValidationError as json_error:
                fault = json_error
        reason = fault.errors()[0]["msg"]
        got = json.dumps(value, default=str)
        raise MethodError(f"{what}: {got} will not do: {_decapitalize(reason)}") from None


def _decapitalize(text: str) -> str:
    return text[:1].lower() + text[1:]


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
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
